"""Products of float32 matrices on a CPU by oneDNN, with which PyTorch is built.

PyTorch itself calls MKL there, which leaves half of the speed of processors that are not Intel's
unused. Everywhere else PyTorch's own product is taken. Both add in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def product(left: Tensor, right: Tensor) -> Tensor:
    """(n, k) @ (k, m) -> (n, m); any strides. Not differentiable: see `Linear`."""
    floats = left.dtype == right.dtype == torch.float32
    if floats and left.is_cpu and left.numel() and right.numel() and _has_onednn():
        found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
        return found
    return left @ right


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
            to_weight = product(x.T, grad).T if is_tall else product(grad.T, x)
        return product(grad, weight) if of_x else None, to_weight, grad.sum(0) if of_bias else None


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
