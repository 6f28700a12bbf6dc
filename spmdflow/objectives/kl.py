"""Estimates of KL(policy || other) from log-probs of the policy's own samples.

Schulman, "Approximating KL divergence" (2020). With d = log pi(y) - log q(y), y ~ pi:
k1 = d is unbiased and noisy; k2 = d^2 / 2 is biased and quiet; k3 = e^-d - 1 + d is unbiased,
quiet and never negative; abs = |d| is a distance, no KL.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmdflow.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: a ratio of 4.8e8 is a fault, but a finite one."""


def bounded(log_ratio: Tensor) -> Tensor:
    """log_ratio clamped to +-MAX_LOG_RATIO; no gradient flows beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(name: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token estimate, same shape as log_probs; ConfigError naming the choices."""
    if name not in KL_ESTIMATORS:
        raise ConfigError(
            f"kl_estimator: got {name!r}; expected one of {sorted(KL_ESTIMATORS)}; choose one"
        )
    return KL_ESTIMATORS[name](log_probs - ref_log_probs)


def _k1(difference: Tensor) -> Tensor:
    return difference


def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def _k3(difference: Tensor) -> Tensor:
    # expm1: e^-d - 1 loses all digits for the tiny d of the first steps
    return torch.expm1(-bounded(difference)) + bounded(difference)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "abs": torch.abs,
}
