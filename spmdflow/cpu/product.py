"""Products of float32 and bfloat16 matrices by oneDNN, which is part of PyTorch's build.

For float32 PyTorch itself calls MKL, which reaches only half of the speed of CPUs that are not
Intel's. On Intel's it is faster than oneDNN, up to 2.5 times where rows are summed, so gradients of
weights are left to it there. (Other products stay with oneDNN: a row of their results does not
depend on the other rows.) For other types, other devices and builds without oneDNN, these functions
call PyTorch's own product. Both accumulate in float32.

bfloat16 on a CPU means products of bfloat16 matrices, and everything between them in float32: a
linear layer with bfloat16 weights takes and returns float32. A processor with avx512_bf16 or AMX
multiplies twice as fast as in float32, but adds and exponentiates no faster. Rounding everything
else would only make the trainer and the generator differ more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from spmdflow.derivative import differentiable_once

_PIECE = 1024
"""Most rows per call of oneDNN. It compiles code for every new shape (milliseconds), so rows, whose
number always differs, are cut into pieces of this size, and the rest is padded (`_padded_size`). A
row's bits do not depend on the size of its piece."""
_FEWEST_ROWS = 8
_UNIT = 16


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return (n, k) @ (k, m) -> (n, m), with any n, few different k and m, and any strides.

    Uses oneDNN on the CPU, in pieces of 1024 rows and padded rows, otherwise PyTorch's product. A
    row of the result does not depend on the other rows. Autograd cannot differentiate this
    function; `Linear` can be trained.
    """
    if not _can_use_onednn(left, right):
        return left @ right
    rows = len(left)
    if rows <= _PIECE or left.shape[1] < right.shape[1]:  # padding left copies less
        padded = _pad_rows(left, _padded_size(rows) - rows)
        return _multiply_with_onednn(padded, right)[:rows]
    result = left.new_empty(rows, right.shape[1])
    for piece, missing in _split_rows(rows):
        padded = _pad_rows(left[piece], missing)
        part = _multiply_with_onednn(padded, right)
        result[piece] = part[: len(padded) - missing]
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b -> (n, out) of x (n, in), by `product` on a CPU; not differentiable there.

    On a CPU x is rounded to the type of the weight, and the result has the type of x. There a row
    of the result does not depend on the other rows.
    """
    if not x.is_cpu:
        return nn.functional.linear(x, weight, bias)
    result = product(x.to(weight.dtype), weight.T).to(x.dtype)
    if bias is None:
        return result
    return result.add_(bias)


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return (n, k)^T @ (n, m) -> (k, m), with any n, few different k and m, and any strides.

    Uses oneDNN on the CPU and sums the products of pieces of rows in float32; otherwise, and for
    float32 on Intel's processors, PyTorch's product.
    """
    if not _sums_rows_with_onednn(left, right):
        return left.T @ right
    result = None
    for piece, missing in _split_rows(len(left)):  # rows of zeros add nothing
        turned = _pad_rows(left[piece], missing).T
        part = _multiply_with_onednn(turned, _pad_rows(right[piece], missing))
        if result is None:
            result = part
        else:
            result = result.float().add_(part)
    if result is None:
        return left.new_zeros(left.shape[1], right.shape[1])
    return result.to(left.dtype)


def write_transposed_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write (n, k)^T @ (n, m) into out (k, m), as `transposed_product`.

    Without a copy where PyTorch multiplies.
    """
    if _sums_rows_with_onednn(left, right):
        out.copy_(transposed_product(left, right))
    else:
        torch.mm(left.T, right, out=out)


def _sums_rows_with_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN computes `transposed_product`: where it can, unless MKL is faster."""
    return _can_use_onednn(left, right) and not _is_faster_with_mkl(left)


def _can_use_onednn(left: Tensor, right: Tensor) -> bool:
    if left.dtype == right.dtype == torch.bfloat16:
        is_fast = multiplies_bfloat16()
    else:
        is_fast = left.dtype == right.dtype == torch.float32
    return is_fast and left.is_cpu and min(left.shape[1], *right.shape) > 0 and _has_onednn()


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The type of what is computed from such weights, except for products: see the module."""
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        return torch.float32
    return weight.dtype


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices in hardware (avx512_bf16 or AMX)."""
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _split_rows(num_rows: int) -> Iterator[tuple[slice, int]]:
    """Yield slices of at most 1024 rows, and how many rows of padding each of them gets."""
    for start in range(0, num_rows, _PIECE):
        size = min(_PIECE, num_rows - start)
        yield slice(start, start + size), _padded_size(size) - size


def _padded_size(num_rows: int) -> int:
    """The number of rows that oneDNN gets for `num_rows`: 8, or one of few larger sizes.

    Up to 256 these are multiples of 16, then there are eight from one power of two to the next.
    """
    if num_rows <= _FEWEST_ROWS:
        return _FEWEST_ROWS
    unit = max(_UNIT, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // unit) * unit


def _pad_rows(x: Tensor, missing: int) -> Tensor:
    """Append rows of zeros to a matrix."""
    if missing == 0:
        return x
    return nn.functional.pad(x, (0, 0, 0, missing))


def _multiply_with_onednn(left: Tensor, right: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return result


def use_onednn_products(module: nn.Module) -> None:
    """Makes every linear layer in the module multiply with `product`, by changing its class."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear


def multiply_in_type_of_weights(module: nn.Module) -> None:
    """Let every part that is no linear layer multiply float32 by its bfloat16 weights on a CPU.

    These are routers, experts and convolutions, whose code expects inputs of the weights' type:
    they get bfloat16 and return float32. Layer norms compute in float32, with rounded weights.
    """
    for part in module.modules():
        if type(part) is nn.LayerNorm:
            part.__class__ = LayerNorm
        elif not isinstance(part, (nn.Linear, nn.Embedding)) and _multiplies(part):
            part.register_forward_pre_hook(_round_inputs, with_kwargs=True)
            part.register_forward_hook(_widen_outputs)


def _multiplies(part: nn.Module) -> bool:
    """Whether a module has a matrix of its own."""
    own = part.parameters(recurse=False)
    return any(tensor.is_floating_point() and tensor.ndim >= 2 for tensor in own)


def _round_inputs(part: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Convert inputs to the type of the weights, if results are computed in another one."""
    weight = next(part.parameters(recurse=False))
    if compute_dtype(weight) == weight.dtype:
        return None
    return _in_type(args, weight.dtype), _in_type(kwargs, weight.dtype)


def _widen_outputs(part: nn.Module, _: Any, output: Any) -> Any:
    """Convert outputs to the type in which results are computed."""
    return _in_type(output, compute_dtype(next(part.parameters(recurse=False))))


def _in_type(values: Any, dtype: torch.dtype) -> Any:
    """The same values, with every floating-point tensor in this type."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return tree_map(convert, values)


class LayerNorm(nn.LayerNorm):
    """PyTorch's layer norm, which computes in the type of its input, whatever its weights have."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, (..., n) -> (..., n)."""
        weight = None if self.weight is None else self.weight.to(input.dtype)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class Linear(nn.Linear):
    """PyTorch's linear layer, which multiplies with `product`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + b: (..., in) -> (..., out), also for a vector (in,)."""
        return trained_linear(input, self.weight, self.bias)


def trained_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, as `linear`, with gradients: (..., in) or (in,) -> (..., out) or (out,)."""
    if x.ndim == 1:
        return trained_linear(x[None], weight, bias)[0]
    rows: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return rows.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W;  dW = dy^T x;  db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b: x (n, in), weight (out, in), bias (out,) or None -> (n, out).

        Saves x, in the type of the weight, and the weight for the backward.
        """
        ctx.save_for_backward(x.to(weight.dtype) if x.is_cpu else x, weight)
        ctx.dtype = x.dtype
        return linear(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias; None for those that are not needed.

        The results cannot be differentiated again: that raises RuntimeError.
        """
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        to_bias = grad.sum(0) if of_bias else None
        grad = grad.to(x.dtype)
        to_weight = None
        if of_weight:
            has_more_rows = len(weight) > x.shape[1]
            if has_more_rows and _sums_rows_with_onednn(grad, x):  # it is faster with few rows
                to_weight = transposed_product(x, grad).T
            else:
                to_weight = transposed_product(grad, x)
        to_x = product(grad, weight).to(ctx.dtype) if of_x else None
        return to_x, to_weight, to_bias


def _is_faster_with_mkl(x: Tensor) -> bool:
    """Whether MKL is faster than oneDNN in a sum over rows: float32 on Intel's processors."""
    return x.is_cpu and x.dtype == torch.float32 and _has_mkl_and_intel()


@cache
def _has_mkl_and_intel() -> bool:
    info = Path("/proc/cpuinfo")
    is_intel = info.exists() and "GenuineIntel" in info.read_text()
    return is_intel and torch.backends.mkl.is_available()


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
