"""Products of float32 matrices on a CPU by oneDNN, with which PyTorch is built.

PyTorch itself calls MKL there, which leaves half of the speed of processors that are not Intel's
unused. Everywhere else PyTorch's own product is taken. Both add in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PIECES = (1024, 128)
"""Rows that oneDNN takes at once. It compiles code for every new shape (milliseconds and 0.6 MB
each), so numbers of tokens, which are never the same, are cut into pieces of these."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """(n, k) @ (k, m) -> (n, m), for any n and few different k and m; any strides.

    Not differentiable: see `Linear`.
    """
    pieces, start = _pieces(left, right)
    if not pieces:
        return left @ right
    found = left.new_empty(len(left), right.shape[1])
    for piece in pieces:
        found[piece] = _by_onednn(left[piece], right)
    torch.mm(left[start:], right, out=found[start:])
    return found


def product_over(left: Tensor, right: Tensor) -> Tensor:
    """(n, k)^T @ (n, m) -> (k, m), for any n and few different k and m; any strides."""
    pieces, start = _pieces(left, right)
    found = left[start:].T @ right[start:]
    for piece in pieces:
        found += _by_onednn(left[piece].T, right[piece])
    return found


def _pieces(left: Tensor, right: Tensor) -> tuple[list[slice], int]:
    """The rows of left that oneDNN takes, and where the others begin."""
    pieces, start = list[slice](), 0
    if left.dtype == right.dtype == torch.float32 and left.is_cpu and _has_onednn():
        for size in _PIECES:
            while len(left) - start >= size:
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
        rows: Tensor = _Linear.apply(input.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return rows.unflatten(0, input.shape[:-1])


class _Linear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W;  dW = dy^T x;  db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (n, in), weight (out, in), bias (out,) -> (n, out)."""
        ctx.save_for_backward(x, weight)
        found = product(x, weight.T)
        return found if bias is None else found.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias, where asked for."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        to_weight = None
        if of_weight:  # faster with few rows
            is_tall = len(weight) > x.shape[1]
            to_weight = product_over(x, grad).T if is_tall else product_over(grad, x)
        return product(grad, weight) if of_x else None, to_weight, grad.sum(0) if of_bias else None


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
