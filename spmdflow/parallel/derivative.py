"""`differentiable_once`: backward functions that refuse to be differentiated themselves.

A backward function that calls kernels without a derivative, or writes in place, gives a second
derivative that is wrong without a word, such as 0. Knows no models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward function whose results raise RuntimeError when somebody differentiates them.

    PyTorch's `once_differentiable` does so only if a gradient that comes in requires a gradient.
    That of a plain sum does not, yet what the function makes of it depends on saved tensors.
    """
    refusing = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            grads = tuple(None if x is None else x.detach().requires_grad_() for x in grads)
        return refusing(ctx, *grads)

    return checked
