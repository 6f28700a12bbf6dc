"""KL estimates, an adaptive KL weight, and importance weights of the generator's samples.

Estimates of KL(policy || other) from the policy's own samples (Schulman, "Approximating KL
divergence", 2020). With d = log pi(y) - log q(y), y ~ pi: k1 = d is unbiased with high variance;
k2 = d^2 / 2 is biased with low variance; k3 = e^-d - 1 + d is unbiased with low variance and never
negative; abs = |d| is a distance and does not estimate the KL.

`AdaptiveKL` adapts the weight of the KL in the reward to the measured KL:

weight = flow.keep(weight=AdaptiveKL(cfg.advantage, target=6.0))
...
batch |= batch.map(measure_kl)
weight.update(batch.mean("reference_kl"))
applied = weight.applied_to(cfg.advantage)
batch |= batch.map(compute_advantages, estimator=applied.estimator, cfg=applied)

`compute_rollout_weights` is truncated importance sampling. Tokens are sampled from the generator's
policy mu, gradients are taken at the trainer's pi_old; they differ by kernels, by precision, or
because mu is a step behind. The weight rho_t = pi_old(y_t) / mu(y_t) makes the estimate unbiased;
truncated at a cap C its variance is bounded (Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"; the truncation of IMPALA, Espeholt et al. 2018). Weights are
constants: `update_actor` multiplies each token's policy loss by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import CorrectionConfig
from spmdflow.config.objective import AdvantageConfig
from spmdflow.data.ragged import (
    VALID,
    chosen_mask,
    lengths_of,
    pad,
    ragged_from_padded,
    valid_rows,
)
from spmdflow.errors import ConfigError
from spmdflow.kind.registry import Registry
from spmdflow.objectives.loss import Reduce, Report, inside
from spmdflow.transfer.register import map_function
from spmdflow.transfer.worker import Mean

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, so that every ratio (at most 4.8e8) is finite."""


def bounded(log_ratio: Tensor) -> Tensor:
    """log_ratio clamped to +-MAX_LOG_RATIO; no gradient flows beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(name: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token estimate, same shape as log_probs; ConfigError if there is no such estimator."""
    return KL_ESTIMATORS.find(name)(log_probs - ref_log_probs)


def _k3(difference: Tensor) -> Tensor:
    # expm1, as e^-d - 1 loses all its digits when d is tiny, as in the first steps
    return torch.expm1(-bounded(difference)) + bounded(difference)


KL_ESTIMATORS: Registry[Callable[[Tensor], Tensor]] = Registry("KL estimator", "kl_estimator")
KL_ESTIMATORS |= {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": _k3,
    "abs": torch.abs,
}

LARGEST_ERROR, GAIN = 0.2, 0.1

A = TypeVar("A", bound=AdvantageConfig)


@map_function(
    reads=("response_mask", "old_log_probs", "ref_log_probs"),
    optional=VALID,
    writes=("reference_kl",),
)
def measure_kl(batch: TensorDict, *, reduce: Reduce, report: Report) -> TensorDict:
    """reference_kl (B,) float32: each response's KL to the reference in nats, k1 over its tokens.

    Reports its mean as advantage/measured_kl. A row that failed has 0 and is not in the mean.
    """
    mask, valid = chosen_mask(batch), valid_rows(batch)
    old, ref = (pad(batch[name]).double() for name in ("old_log_probs", "ref_log_probs"))
    kl = inside(kl_estimate("k1", old, ref), mask).sum(-1)
    rows = float(len(kl) if valid is None else valid.sum())
    report({"advantage/measured_kl": Mean(float(kl.sum()), rows)})
    return TensorDict({"reference_kl": kl.to(torch.float32)}, batch_size=batch.batch_size)


class KeptNumber:
    """A number that resumes with the run: see `flow.keep`."""

    value: float

    def state_dict(self) -> dict[str, float]:
        """Its value."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with the value of `state_dict`."""
        self.value = state["value"]


class AdaptiveKL(KeptNumber):
    """kl_coef, which grows while the KL is above its target and shrinks while it is below.

    e = clip(KL / target - 1, -0.2, 0.2),  kl_coef <- kl_coef (1 + 0.1 e)

    Ziegler et al. 2019, section 2.2, eq. 4; their gain of 0.1 is for one update per step.
    """

    def __init__(self, cfg: AdvantageConfig, *, target: float) -> None:
        """cfg.kl_coef: the weight to begin with. target: KL of a response in nats.

        ConfigError unless both are above 0.
        """
        if not (cfg.kl_coef > 0 and target > 0):
            got = f"advantage.kl_coef {cfg.kl_coef:g} and target {target:g}"
            expected = "both above 0, as the weight is multiplied"
            raise ConfigError.of("AdaptiveKL", got, expected, "set them")
        self.value, self._target = cfg.kl_coef, target

    def update(self, mean_kl: float) -> None:
        """One step towards the target, by the mean KL of a batch's responses in nats."""
        error = min(max(mean_kl / self._target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= 1 + GAIN * error

    def applied_to(self, cfg: A) -> A:
        """The same settings with the weight as it is now."""
        return replace(cfg, kl_coef=self.value)


def _serving(arguments: Mapping[str, Any]) -> dict[str, str]:
    """rollout_log_probs may serve for weights of tokens, near 1; not for a response's product."""
    by_token = getattr(arguments.get("cfg"), "kind", "sequence") != "sequence"
    return {"old_log_probs": "rollout_log_probs"} if by_token else {}


@map_function(
    reads=("response_mask", "old_log_probs", "rollout_log_probs"),
    optional=VALID,
    writes=("rollout_weights",),
    instead=_serving,
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
    """w_t = min(rho_t, C): the cap adds a bias where it acts and bounds the variance."""
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
