"""Policy losses per token, by name: `@policy_loss("name")` makes one known to a run.

A policy loss is a function `(log_probs, old_log_probs, advantages, mask, cfg) -> (loss, ratio,
clipped)`, all tensors (B, R). r_t = pi(y_t) / pi_old(y_t) is the probability ratio, its logarithm
clamped to +-20, and clip(r) keeps it in [1 - clip_ratio, 1 + clip_ratio_high]; without
clip_ratio_high the range is symmetric. A script adds its own function with the decorator at module
level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from spmdflow.config.schema import PolicyLossConfig
from spmdflow.errors import ConfigError
from spmdflow.objectives.kl import bounded
from spmdflow.objectives.reduction import inside


class Surrogate(NamedTuple):
    """Per-token terms of a policy loss, each (B, R)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """bool: a clip is what counts, so the ratio passes no gradient (CISPO: it is held)."""


PolicyTerms = Callable[
    [Tensor, Tensor, Tensor, Tensor, PolicyLossConfig], tuple[Tensor, Tensor, Tensor]
]

_REGISTRY: dict[str, PolicyTerms] = {}


def policy_loss(name: str) -> Callable[[PolicyTerms], PolicyTerms]:
    """Register a policy loss under a name; the last one of a module's own wins.

    ConfigError if the name belongs to a function of another module.
    """

    def add(terms: PolicyTerms) -> PolicyTerms:
        taken = _REGISTRY.get(name)
        if taken is not None and taken.__module__ != terms.__module__:
            raise ConfigError(
                f"policy loss {name!r}: got a definition in {terms.__module__}, expected a name "
                f"that is not taken by {taken.__module__}; choose another"
            )
        _REGISTRY[name] = terms
        return terms

    return add


def policy_terms_of(name: str) -> PolicyTerms:
    """The policy loss of that name; ConfigError naming the choices."""
    if name not in _REGISTRY:
        raise ConfigError(
            f"loss.surrogate: got {name!r}; expected one of {sorted(_REGISTRY)}; choose one or "
            f"add yours with @policy_loss({name!r})"
        )
    return _REGISTRY[name]


@policy_loss("ppo")
def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-min(r A, clip(r) A) (PPO, Schulman et al. 2017, eq. 7).

    With clip_ratio_high above clip_ratio rare tokens may grow faster than they shrink
    (clip-higher; DAPO, Yu et al. 2025, eq. 10). With dual_clip c the loss of a negative advantage
    is at most -c A, however large r is (Ye et al. 2020, eq. 5).
    """
    ratio = torch.exp(bounded(log_probs - old_log_probs))
    return _clipped(ratio, advantages, cfg)


@policy_loss("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """PPO's loss with the sequence ratio s = exp(mean_t log r_t) at every token of a row.

    GSPO-token (Zheng et al. 2025, eq. 13-14): s_t = sg[s] pi(y_t) / sg[pi(y_t)] has the value s,
    and its gradient goes to token t alone, so that advantages may differ between tokens. With
    equal advantages and loss.aggregation sequence-mean-token-mean it is GSPO (eq. 5). Its clip
    ratios are small, about 3e-4.
    """
    log_ratio = inside(log_probs - old_log_probs, mask)
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(bounded(mean.detach()) + (log_probs - log_probs.detach()))
    return _clipped(ratio, advantages, cfg)


@policy_loss("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-sg[clip(r)] A log pi: the weight is clipped and every token keeps its gradient.

    CISPO (MiniMax-M1 2025, eq. 4-5).
    """
    ratio = torch.exp(bounded(log_probs - old_log_probs))
    weight = ratio.clamp(*_range(cfg)).detach()
    return Surrogate(-weight * advantages * log_probs, ratio, weight != ratio)


@policy_loss("plain")
def plain(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-A log pi (REINFORCE, Williams 1992): for one optimizer step on samples of the policy."""
    ratio = torch.exp(bounded(log_probs - old_log_probs))
    return Surrogate(-advantages * log_probs, ratio, torch.zeros_like(mask))


def _clipped(ratio: Tensor, advantages: Tensor, cfg: PolicyLossConfig) -> Surrogate:
    free = -advantages * ratio
    held = -advantages * ratio.clamp(*_range(cfg))
    loss, clipped = torch.maximum(free, held), held > free
    if cfg.dual_clip is not None:
        most = -advantages * cfg.dual_clip
        beyond = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(beyond, most, loss), clipped | beyond
    return Surrogate(loss, ratio, clipped)


def _range(cfg: PolicyLossConfig) -> tuple[float, float]:
    high = cfg.clip_ratio if cfg.clip_ratio_high is None else cfg.clip_ratio_high
    return 1 - cfg.clip_ratio, 1 + high
