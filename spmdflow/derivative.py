"""Functions with their own backward: linear ones, and a check against second derivatives.

A backward function that calls kernels without a derivative, or writes in place, silently gives a
wrong second derivative, such as 0. This module does not know models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward function so that differentiating its results raises RuntimeError.

    PyTorch's `once_differentiable` does so only if an incoming gradient requires a gradient. The
    gradient of a plain sum does not, although the function's result depends on saved tensors. So
    this wrapper marks incoming gradients as requiring one whenever gradients are recorded
    (create_graph).
    """
    refusing = once_differentiable(backward)

    @functools.wraps(backward)
    def check_and_call(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            grads = tuple(None if x is None else x.detach().requires_grad_() for x in grads)
        return refusing(ctx, *grads)

    return check_and_call


def apply_linear(
    x: Tensor, function: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return function(x), whose backward is adjoint(gradient).

    function: linear, such as an all-gather. adjoint: its transpose, such as a reduce-scatter.
    Neither is differentiated itself.
    """
    result: Tensor = _Linear.apply(x, function, adjoint)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """See `apply_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return function(x)."""
        ctx.adjoint = adjoint
        return function(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the adjoint of the gradient."""
        return ctx.adjoint(grad), None, None
