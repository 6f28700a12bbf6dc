"""Policy losses by name: `@policy_loss("name")` registers one.

A policy loss is a function `(log_probs, old_log_probs, advantages, mask, cfg) -> (loss, ratio,
clipped)`, all tensors (B, R). r_t = pi(y_t) / pi_old(y_t) is the probability ratio, its logarithm
clamped to +-20, and clip(r) keeps it in [1 - clip_ratio, 1 + clip_ratio_high]; without
clip_ratio_high the range is symmetric. A script adds its own function with the decorator at module
level. sg is stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from spmdflow.config.objective import PolicyLossConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.registry import Registry
from spmdflow.objectives.kl import clamp_log_ratio
from spmdflow.objectives.loss import zero_outside


class Surrogate(NamedTuple):
    """Per-token terms of a policy loss, each (B, R)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """bool: the token is clipped and passes no gradient (CISPO: only its weight is clipped)."""


PolicyTerms = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(log_probs, old_log_probs, advantages, mask, cfg) -> the terms."""

POLICY_LOSSES: Registry[PolicyTerms] = Registry(
    "policy loss", "loss.surrogate", decorator="policy_loss({name!r})"
)

policy_loss = POLICY_LOSSES.register
"""`@policy_loss("name")` on `fn(log_probs, old_log_probs, advantages, mask, cfg)`, all (B, R),
which returns (loss, ratio, clipped), each (B, R); then `actor.loss.surrogate=name`."""


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
    ratio = torch.exp(clamp_log_ratio(log_probs - old_log_probs))
    return _clip_ratio(ratio, advantages, cfg)


@policy_loss("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """PPO's clipped loss with the sequence ratio s = exp(mean_t log r_t) at every token of a row.

    GSPO-token (Zheng et al. 2025, eq. 13-14): s_t = sg[s] pi(y_t) / sg[pi(y_t)] has the value s,
    and its gradient goes only to token t, so that advantages may differ between tokens. With equal
    advantages it is GSPO (eq. 5), whose loss is the mean over sequences: loss.aggregation is
    sequence-mean-token-mean unless it is set. Its clip ratios are small, about 3e-4.
    """
    log_ratio = zero_outside(log_probs - old_log_probs, mask)
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(clamp_log_ratio(mean.detach()) + (log_probs - log_probs.detach()))
    return _clip_ratio(ratio, advantages, cfg)


@policy_loss("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-sg[clip(r)] A log pi: the weight is clipped, but every token passes a gradient.

    CISPO (MiniMax-M1 2025, eq. 4-5).
    """
    ratio = torch.exp(clamp_log_ratio(log_probs - old_log_probs))
    weight = ratio.clamp(*_clip_range(cfg)).detach()
    return Surrogate(-weight * advantages * log_probs, ratio, weight != ratio)


@policy_loss("plain")
def plain(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-A log pi (REINFORCE, Williams 1992): for a single optimizer step on on-policy samples."""
    ratio = torch.exp(clamp_log_ratio(log_probs - old_log_probs))
    return Surrogate(-advantages * log_probs, ratio, torch.zeros_like(mask))


@policy_loss("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate on the ratio instead of a clip.

    SAPO (Gao et al. 2025, arXiv 2511.20347): tau is the first of loss.sapo_temperatures where A >
    0, and the second, larger one elsewhere, so that tokens that lose probability fade sooner.
    Nothing counts as clipped. As in the paper, token losses are averaged over each sequence, then
    over sequences: loss.aggregation is sequence-mean-token-mean unless it is set.
    """
    ratio = torch.exp(clamp_log_ratio(log_probs - old_log_probs))
    gains, losses = ratio.new_tensor(cfg.sapo_temperatures)
    tau = torch.where(advantages > 0, gains, losses)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return Surrogate(-gate * advantages, ratio, torch.zeros_like(mask))


@policy_loss("gmpo")
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-A exp(mean_t g_t): the geometric mean of a row's clipped ratios, at each of its tokens.

    g_t = min(log r_t, clip) where A > 0, otherwise max(log r_t, clip), clip = log r_t clamped to
    [-clip_ratio, clip_ratio_high]: GMPO (Zhao et al. 2025, arXiv 2507.20673), whose ratios lie in
    (e^-0.4, e^0.4). A is the mean of the row's advantages. As in the paper, the loss is the mean
    over sequences: loss.aggregation is sequence-mean-token-mean unless it is set. The paper has no
    rollout weights; here a row counts with the arithmetic mean of its tokens' weights.
    """
    gap = clamp_log_ratio(zero_outside(log_probs - old_log_probs, mask))
    low, high = _clip_range(cfg)
    near = gap.clamp(low - 1, high - 1)
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    advantage = zero_outside(advantages, mask).sum(-1, keepdim=True) / count
    clipped_gap = torch.where(advantage > 0, torch.minimum(gap, near), torch.maximum(gap, near))
    ratio = torch.exp(clipped_gap.sum(-1, keepdim=True) / count).expand_as(gap)
    return Surrogate(-advantage * ratio, ratio, (clipped_gap != gap) & mask)


@policy_loss("dppo_tv")
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-sg[min(r, c)] A log pi at tokens whose probability may still move, 0 at the others.

    DPPO with binary total variation (Qi et al. 2026, arXiv 2602.04879). With d = pi - pi_old, a
    token is dropped where d > clip_ratio_high and A > 0, or d < -clip_ratio and A <= 0. The bounds
    are of a probability, not of a ratio. c is dual_clip, or 20. sg: no gradient flows through it.
    """
    moved = torch.exp(log_probs) - torch.exp(old_log_probs)
    low, high = _clip_range(cfg)
    far = torch.where(advantages > 0, moved > high - 1, moved < low - 1)
    return _mask_far_tokens(log_probs, old_log_probs, advantages, far, cfg)


@policy_loss("dppo_kl")
def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-sg[min(r, c)] A log pi at tokens whose distribution may still move, 0 at the others.

    Like `dppo_tv`, but with the KL of the binary distribution "this token or another one" (Qi et
    al. 2026): D = KL(pi_old || pi) = p log(p / q) + (1 - p) log((1 - p + e) / (1 - q + e)), p =
    pi_old, q = pi, e = 1e-8. A token is dropped where D > clip_ratio_high, q > p and A > 0, or D >
    clip_ratio, q < p and A <= 0.
    """
    q = torch.exp(log_probs)
    p = torch.exp(old_log_probs)
    others = torch.log((1 - p + 1e-8) / (1 - q + 1e-8))
    divergence = p * (old_log_probs - log_probs) + (1 - p) * others
    low, high = _clip_range(cfg)
    up = (divergence > high - 1) & (q > p)
    down = (divergence > 1 - low) & (q < p)
    far = torch.where(advantages > 0, up, down)
    return _mask_far_tokens(log_probs, old_log_probs, advantages, far, cfg)


def _mask_far_tokens(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, far: Tensor, cfg: PolicyLossConfig
) -> Surrogate:
    """Return the loss -sg[min(r, c)] A log pi, 0 where `far`, with the ratio r and far as clipped.

    c is cfg.dual_clip, or 20. sg: no gradient flows through it.
    """
    ratio = torch.exp(clamp_log_ratio(log_probs - old_log_probs))
    weight = ratio.detach().clamp(max=cfg.dual_clip or 20.0).masked_fill(far, 0.0)
    return Surrogate(-weight * advantages * log_probs, ratio, far)


@policy_loss("dro")
def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
) -> Surrogate:
    """-(A log pi - beta / 2 (log pi - log pi_old)^2), beta = loss.dro_beta; nothing is clipped.

    Direct reward optimisation (Richemond et al. 2024, arXiv 2405.19107, section 3.3), per token,
    with the policy before the update as its reference. ConfigError if loss.dro_beta is not set.
    """
    if cfg.dro_beta is None:
        got = "none with loss.surrogate=dro"
        expected = "a number above 0"
        raise ConfigError.of("loss.dro_beta", got, expected, "set it, such as 0.1")
    gap = clamp_log_ratio(log_probs - old_log_probs)
    loss = cfg.dro_beta / 2 * gap.square() - advantages * log_probs
    return Surrogate(loss, torch.exp(gap), torch.zeros_like(mask))


MARKED = ("kl_cov", "clip_cov")
"""Losses with a sixth argument: marked, (B, R) bool, from `mark_covariant_tokens`."""


@policy_loss("kl_cov")
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
    marked: Tensor,
) -> Surrogate:
    """-r A, plus covariance_kl_coef |log r| at marked tokens (KL-Cov, Cui et al. 2025, section 4).

    Marked tokens have the largest covariance of log-probability and advantage, so they reduce the
    entropy most: "The entropy mechanism of RL for reasoning LMs", arXiv 2505.22617. Nothing is
    clipped.
    """
    gap = clamp_log_ratio(log_probs - old_log_probs)
    ratio = torch.exp(gap)
    loss = -advantages * ratio + cfg.covariance_kl_coef * gap.abs() * marked
    return Surrogate(loss, ratio, torch.zeros_like(mask))


@policy_loss("clip_cov")
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: PolicyLossConfig,
    marked: Tensor,
) -> Surrogate:
    """PPO's loss, with 0 and no gradient at marked tokens (Clip-Cov, Cui et al. 2025).

    Marked tokens are drawn at random among those whose covariance lies in loss.covariance_bounds.
    They count as clipped.
    """
    loss, ratio, clipped = ppo(log_probs, old_log_probs, advantages, mask, cfg)
    return Surrogate(loss * ~marked, ratio, clipped | marked)


def _clip_ratio(ratio: Tensor, advantages: Tensor, cfg: PolicyLossConfig) -> Surrogate:
    """Return PPO's loss of each token, max(-r A, -clip(r) A), the ratios, and which are clipped.

    With cfg.dual_clip c the loss of a negative advantage is at most -c A; beyond that a token
    counts as clipped too.
    """
    free = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(*_clip_range(cfg))
    loss = torch.maximum(free, clipped_loss)
    clipped = clipped_loss > free
    if cfg.dual_clip is not None:
        most = -advantages * cfg.dual_clip
        beyond = (advantages < 0) & (loss > most)
        loss = torch.where(beyond, most, loss)
        clipped = clipped | beyond
    return Surrogate(loss, ratio, clipped)


def _clip_range(cfg: PolicyLossConfig) -> tuple[float, float]:
    high = cfg.clip_ratio if cfg.clip_ratio_high is None else cfg.clip_ratio_high
    return 1 - cfg.clip_ratio, 1 + high
