"""Truncated importance sampling: what the rollout engine sampled, weighted as the trainer's policy.

Tokens are drawn from the generator's mu, gradients are the trainer's pi_old: another kernel or
precision, or weights that are a step behind. The weight rho_t = pi_old(y_t) / mu(y_t) makes the
estimate unbiased; truncated at a cap C its variance is bounded (Yao et al. 2025, "Your efficient
RL framework secretly brings you off-policy RL training"; the truncation of IMPALA, Espeholt et al.
2018). Weights are constants: `update_actor` multiplies each token's policy loss by them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import CorrectionConfig
from spmdflow.data.ragged import VALID, chosen_mask, lengths_of, pad, ragged_from_padded
from spmdflow.objectives.kl import bounded, kl_estimate
from spmdflow.objectives.loss import Reduce, Report, inside
from spmdflow.objectives.registry import Registry
from spmdflow.transfer.register import map_function


@map_function(
    reads=("response_mask", "old_log_probs", "rollout_log_probs"),
    optional=VALID,
    writes=("rollout_weights",),
)
def compute_rollout_weights(
    batch: TensorDict, *, cfg: CorrectionConfig, reduce: Reduce, report: Report
) -> TensorDict:
    """Ragged float32 weight of each token; 0 where the policy chose nothing.

    Reports, over the policy's tokens of all rows: rollout/weight_mean, weight_clipped (share that
    the cap changes), weight_ess (effective share of the samples, (sum w)^2 / (n sum w^2)), and
    rollout/trainer_kl, k3 of KL(mu || pi_old).
    """
    mask = chosen_mask(batch)
    old, rollout = (pad(batch[name]).double() for name in ("old_log_probs", "rollout_log_probs"))
    log_ratio = inside(old - rollout, mask)
    weights, changed = CORRECTIONS.find(cfg.kind)(log_ratio, mask, cfg.cap)
    kl = inside(kl_estimate("k3", rollout, old), mask)
    report(_metrics(weights, changed & mask, kl, mask, reduce))
    column = ragged_from_padded(weights.float(), lengths_of(batch["response_mask"]))
    return TensorDict({"rollout_weights": column}, batch_size=batch.batch_size)


Weights = tuple[Tensor, Tensor]
"""(weights, which of them the cap changed), both (B, R)."""


def by_token(log_ratio: Tensor, mask: Tensor, cap: float) -> Weights:
    """w_t = min(rho_t, C): biased where the cap counts, never noisier than C."""
    ratio = inside(torch.exp(bounded(log_ratio)), mask)
    return ratio.clamp(max=cap), ratio > cap


def by_sequence(log_ratio: Tensor, mask: Tensor, cap: float) -> Weights:
    """w = min(prod_t rho_t, C), the same at every token: the weight of the whole response."""
    total = torch.exp(bounded(inside(log_ratio, mask).sum(-1, keepdim=True)))
    ratio = total * mask
    return ratio.clamp(max=cap), ratio > cap


def by_mask(log_ratio: Tensor, mask: Tensor, cap: float) -> Weights:
    """w_t = rho_t if 1/C <= rho_t <= C, else 0: a token that differs too much does not count.

    Double-sided masking (IcePop, Ling Team 2025).
    """
    ratio = inside(torch.exp(bounded(log_ratio)), mask)
    far = (ratio > cap) | (ratio < 1 / cap)
    return ratio.masked_fill(far, 0.0), far


CORRECTIONS: Registry[Callable[[Tensor, Tensor, float], Weights]] = Registry(
    "correction", "correction.kind"
)
CORRECTIONS |= {"token": by_token, "sequence": by_sequence, "mask": by_mask}


def _metrics(
    weights: Tensor, changed: Tensor, kl: Tensor, mask: Tensor, reduce: Reduce
) -> dict[str, float]:
    parts = [mask, weights, weights.square(), changed, kl]
    sums = reduce(torch.stack([part.double().sum() for part in parts]))
    tokens, weight, square, num_changed, total_kl = sums.tolist()
    tokens = max(tokens, 1.0)
    return {
        "rollout/weight_mean": weight / tokens,
        "rollout/weight_clipped": num_changed / tokens,
        "rollout/weight_ess": weight**2 / (tokens * square) if square else 0.0,
        "rollout/trainer_kl": total_kl / tokens,
    }
