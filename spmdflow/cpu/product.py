"""Products of float32 matrices by oneDNN, which is part of PyTorch's build.

PyTorch itself calls MKL, which reaches only half of the speed of CPUs that are not Intel's. For
other types, other devices and builds without oneDNN, these functions call PyTorch's own product.
Both accumulate in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spmdflow.derivative import differentiable_once

_PIECES = (1024, 128)
"""Numbers of rows per call of oneDNN. It compiles code for every new shape (milliseconds and 0.6 MB
each), so rows, whose number always differs, are cut into pieces of these sizes, and fewer rows are
padded (`_padded_size`). A row's bits do not depend on the size of its piece."""
_PADDED_TO = 16


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return (n, k) @ (k, m) -> (n, m), with any n, few different k and m, and any strides.

    Uses oneDNN for float32 on the CPU, in pieces of 1024 and 128 rows or padded rows, otherwise
    PyTorch's product. A row of the result does not depend on the other rows. Autograd cannot
    differentiate this function; `Linear` can be trained.
    """
    if not _can_use_onednn(left, right):
        return left @ right
    if len(left) > _PIECES[0] and left.shape[1] < right.shape[1]:  # padding left copies less
        unit = 1 << (len(left).bit_length() - 4)
        padded = nn.functional.pad(left, (0, 0, 0, -len(left) % unit))
        return _multiply_with_onednn(padded, right)[: len(left)]
    pieces, start = _split_rows(len(left))
    num_left_over = len(left) - start
    if not pieces and num_left_over == _padded_size(num_left_over):
        return _multiply_with_onednn(left, right)
    result = left.new_empty(len(left), right.shape[1])
    for piece in pieces:
        result[piece] = _multiply_with_onednn(left[piece], right)
    if num_left_over:
        padded = left.new_zeros(_padded_size(num_left_over), left.shape[1])
        padded[:num_left_over] = left[start:]
        result[start:] = _multiply_with_onednn(padded, right)[:num_left_over]
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b -> (n, out) of x (n, in), by `product` on a CPU; not differentiable there.

    A row of the result does not depend on the other rows on a CPU.
    """
    if not x.is_cpu:
        return nn.functional.linear(x, weight, bias)
    result = product(x, weight.T)
    if bias is None:
        return result
    return result.add_(bias)


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return (n, k)^T @ (n, m) -> (k, m), with any n, few different k and m, and any strides.

    Uses oneDNN for float32 on the CPU and sums the products of pieces of rows; otherwise PyTorch's
    product.
    """
    if not _can_use_onednn(left, right):
        return left.T @ right
    pieces, start = _split_rows(len(left))
    num_left_over = len(left) - start
    if num_left_over:
        missing = _padded_size(num_left_over) - num_left_over  # rows of zeros add nothing
        last = [nn.functional.pad(x[start:], (0, 0, 0, missing)) for x in (left, right)]
        result = _multiply_with_onednn(last[0].T, last[1])
    else:
        result = left.new_zeros(left.shape[1], right.shape[1])
    for piece in pieces:
        result += _multiply_with_onednn(left[piece].T, right[piece])
    return result


def _can_use_onednn(left: Tensor, right: Tensor) -> bool:
    is_single = left.dtype == right.dtype == torch.float32
    return is_single and left.is_cpu and min(left.shape[1], *right.shape) > 0 and _has_onednn()


def _split_rows(num_rows: int) -> tuple[list[slice], int]:
    """Return slices of 1024, then 128 rows, and the start of the remainder (< 128)."""
    pieces = list[slice]()
    start = 0
    for size in _PIECES:
        while num_rows - start >= size:
            pieces.append(slice(start, start + size))
            start += size
    return pieces, start


def _padded_size(num_rows: int) -> int:
    """The number of rows that oneDNN gets for 1 to 128 rows: 8, or a multiple of 16."""
    if num_rows <= _PADDED_TO // 2:
        return _PADDED_TO // 2
    return -(-num_rows // _PADDED_TO) * _PADDED_TO


def _multiply_with_onednn(left: Tensor, right: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return result


def use_onednn_products(module: nn.Module) -> None:
    """Makes every linear layer in the module multiply with `product`, by changing its class."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear


class Linear(nn.Linear):
    """PyTorch's linear layer, which multiplies with `product`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + b: (..., in) -> (..., out), also for a vector (in,)."""
        if input.ndim == 1:
            return self(input[None])[0]
        rows: Tensor = _Linear.apply(input.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return rows.unflatten(0, input.shape[:-1])


class _Linear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W;  dW = dy^T x;  db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b: x (n, in), weight (out, in), bias (out,) or None -> (n, out).

        Saves x and weight for the backward.
        """
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias; None for those that are not needed.

        The results cannot be differentiated again: that raises RuntimeError.
        """
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        to_weight = None
        if of_weight:
            if len(weight) > x.shape[1]:  # oneDNN is faster with few rows in the result
                to_weight = transposed_product(x, grad).T
            else:
                to_weight = transposed_product(grad, x)
        return product(grad, weight) if of_x else None, to_weight, grad.sum(0) if of_bias else None


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
