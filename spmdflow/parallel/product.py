"""Products of float32 matrices on a CPU by oneDNN, with which PyTorch is built.

PyTorch itself calls MKL there, which leaves half of the speed of processors that are not Intel's
unused. Everywhere else PyTorch's own product is taken. Both add in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spmdflow.parallel.derivative import differentiable_once

_PIECES = (1024, 128, 32)
"""Rows that oneDNN takes at once. It compiles code for every new shape (milliseconds and 0.6 MB
each), so numbers of tokens, which are never the same, are cut into pieces of these, or padded to
one of eight numbers between two powers of two. A row's bits are the same in each of them."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """(n, k) @ (k, m) -> (n, m), for any n and few different k and m; any strides.

    A row of the result does not depend on the other rows. Not differentiable: see `Linear`.
    """
    if not _fits(left, right):
        return left @ right
    if len(left) > _PIECES[0] and left.shape[1] < right.shape[1]:  # less to copy than the result
        unit = 1 << (len(left).bit_length() - 4)
        padded = nn.functional.pad(left, (0, 0, 0, -len(left) % unit))
        return _by_onednn(padded, right)[: len(left)]
    pieces, start = _pieces(len(left))
    found = left.new_empty(len(left), right.shape[1])
    for piece in pieces:
        found[piece] = _by_onednn(left[piece], right)
    if rest := len(left) - start:
        padded = left.new_zeros(_PIECES[-1], left.shape[1])
        padded[:rest] = left[start:]
        found[start:] = _by_onednn(padded, right)[:rest]
    return found


def product_over(left: Tensor, right: Tensor) -> Tensor:
    """(n, k)^T @ (n, m) -> (k, m), for any n and few different k and m; any strides."""
    pieces, start = _pieces(len(left)) if _fits(left, right) else ([], 0)
    found = left[start:].T @ right[start:]
    for piece in pieces:
        found += _by_onednn(left[piece].T, right[piece])
    return found


def _fits(left: Tensor, right: Tensor) -> bool:
    is_single = left.dtype == right.dtype == torch.float32
    return is_single and left.is_cpu and min(left.shape[1], *right.shape) > 0 and _has_onednn()


def _pieces(num_rows: int) -> tuple[list[slice], int]:
    """The pieces of so many rows, and where the rest begins."""
    pieces = list[slice]()
    start = 0
    for size in _PIECES:
        while num_rows - start >= size:
            pieces.append(slice(start, start + size))
            start += size
    return pieces, start


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return found


def use_products(module: nn.Module) -> None:
    """Let every linear layer below module multiply by `product`."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear


class Linear(nn.Linear):
    """PyTorch's, by `product`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if input.ndim == 1:
            return self(input[None])[0]
        rows: Tensor = _Linear.apply(input.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return rows.unflatten(0, input.shape[:-1])


class _Linear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W;  dW = dy^T x;  db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (n, in), weight (out, in), bias (out,) -> (n, out)."""
        ctx.save_for_backward(x, weight)
        found = product(x, weight.T)
        if bias is None:
            return found
        return found.add_(bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias, where asked for."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        to_weight = None
        if of_weight:  # faster with few rows
            is_tall = len(weight) > x.shape[1]
            if is_tall:
                to_weight = product_over(x, grad).T
            else:
                to_weight = product_over(grad, x)
        return product(grad, weight) if of_x else None, to_weight, grad.sum(0) if of_bias else None


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
