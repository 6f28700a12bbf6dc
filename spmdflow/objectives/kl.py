"""KL estimates, an adaptive KL weight, and importance weights of the generator's samples.

Estimates of KL(policy || other) from the policy's own samples (Schulman, "Approximating KL
divergence", 2020). With d = log pi(y) - log q(y), y ~ pi: k1 = d is unbiased with high variance;
k2 = d^2 / 2 is biased with low variance; k3 = e^-d - 1 + d is unbiased with low variance and never
negative; abs = |d| is a distance and does not estimate the KL. As losses, k1 and k3 have gradients
whose mean is not the KL's gradient; k2's is. k1+, k3+ and abs+ have the value of k1, k3 and abs and
the gradient of k2 (straight-through): d^2 / 2 - sg[d^2 / 2] + sg[k].

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

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.objective import AdvantageConfig, CorrectionConfig
from spmdflow.data.ragged import (
    VALID,
    lengths_of,
    pad,
    ragged_from_padded,
    sampled_mask,
    valid_rows,
)
from spmdflow.errors import ConfigError
from spmdflow.kind.registry import Registry
from spmdflow.objectives.loss import Reduce, Report, zero_outside
from spmdflow.worker_api.metric import Max, Mean, Metric, Min
from spmdflow.worker_api.register import map_function

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, so that every ratio (at most 4.8e8) is finite."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """log_ratio clamped to +-MAX_LOG_RATIO. Clamped entries pass no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(name: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token KL estimate, same shape as log_probs. ConfigError if the estimator is unknown."""
    return KL_ESTIMATORS.find(name)(log_probs - ref_log_probs)


def _k3(difference: Tensor) -> Tensor:
    # expm1, as e^-d - 1 loses all its digits when d is tiny, as in the first steps
    return torch.expm1(-clamp_log_ratio(difference)) + clamp_log_ratio(difference)


def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def _straight_through(value: Tensor, difference: Tensor) -> Tensor:
    slope = _k2(clamp_log_ratio(difference))
    return slope - slope.detach() + value.detach()


KL_ESTIMATORS: Registry[Callable[[Tensor], Tensor]] = Registry("KL estimator", "kl_estimator")
KL_ESTIMATORS |= {
    "k1": lambda difference: difference,
    "k2": _k2,
    "k3": _k3,
    "abs": torch.abs,
    "k1+": lambda difference: _straight_through(difference, difference),
    "k3+": lambda difference: _straight_through(_k3(difference), difference),
    "abs+": lambda difference: _straight_through(difference.abs(), difference),
}

LARGEST_ERROR = 0.2

A = TypeVar("A", bound=AdvantageConfig)


@map_function(
    reads=("response_mask", "old_log_probs", "ref_log_probs"),
    optional=VALID,
    writes=("reference_kl",),
)
def measure_kl(batch: TensorDict, *, reduce: Reduce, report: Report) -> TensorDict:
    """Return reference_kl, (B,) float32: the KL of each response to the reference in nats.

    It is the sum of k1, log pi_old - log pi_ref, over the tokens that the policy chose. A row that
    failed has 0. Reports advantage/measured_kl, the mean over the other rows.
    """
    mask = sampled_mask(batch)
    valid = valid_rows(batch)
    old, ref = (pad(batch[name]).double() for name in ("old_log_probs", "ref_log_probs"))
    kl = zero_outside(kl_estimate("k1", old, ref), mask).sum(-1)
    rows = float(len(kl) if valid is None else valid.sum())
    report({"advantage/measured_kl": Mean(float(kl.sum()), rows)})
    return TensorDict({"reference_kl": kl.to(torch.float32)}, batch_size=batch.batch_size)


class ResumableNumber:
    """A number that is saved and restored with the run: see `flow.keep`."""

    value: float

    def state_dict(self) -> dict[str, float]:
        """The value, for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the value from `state_dict`."""
        self.value = state["value"]


class AdaptiveKL(ResumableNumber):
    """A kl_coef that grows while the KL is above its target and shrinks while it is below.

    e = clip(KL / target - 1, -0.2, 0.2),  kl_coef <- kl_coef (1 + gain e)

    Ziegler et al. 2019, section 2.2, eq. 4, whose gain of 0.1 is for one update per step. For a
    controller that has a horizon in samples, set gain = samples per step / horizon.
    """

    def __init__(self, cfg: AdvantageConfig, *, target: float, gain: float = 0.1) -> None:
        """cfg.kl_coef: the initial weight. target: KL of a response in nats.

        Raises ConfigError unless kl_coef, target and gain are above 0 and gain is below 5, which
        keeps the weight above 0.
        """
        if not (cfg.kl_coef > 0 and target > 0 and 0 < gain < 1 / LARGEST_ERROR):
            got = f"advantage.kl_coef {cfg.kl_coef:g}, target {target:g} and gain {gain:g}"
            expected = "all above 0, and gain below 5, as the weight is multiplied"
            raise ConfigError.of("AdaptiveKL", got, expected, "set them")
        self.value = cfg.kl_coef
        self._target = target
        self._gain = gain

    def update(self, mean_kl: float) -> None:
        """Adapt the weight to mean_kl, the mean KL of a batch's responses in nats.

        value *= 1 + gain * e, e = mean_kl / target - 1 clipped to +-0.2.
        """
        error = min(max(mean_kl / self._target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= 1 + self._gain * error

    def applied_to(self, cfg: A) -> A:
        """A copy of the settings with the current weight."""
        return replace(cfg, kl_coef=self.value)


@map_function(
    reads=("response_mask", "old_log_probs", "rollout_log_probs"),
    optional=VALID,
    writes=("rollout_weights",),
)
def compute_rollout_weights(
    batch: TensorDict, *, cfg: CorrectionConfig, reduce: Reduce, report: Report
) -> TensorDict:
    """Return rollout_weights: ragged float32, 0 at tokens that the policy did not choose.

    They are importance weights of rho_t = pi_old(y_t) / mu(y_t), by cfg.kind: `by_token`,
    `by_sequence` or `by_mask`, with cfg.cap. With cfg.normalise they are divided by their mean over
    the tokens of all rows (over the rows, for weights of sequences), so that the loss keeps its
    scale. Reports `mismatch_metrics` and, for the weights before this division, over the policy's
    tokens of all rows: rollout/weight_mean, weight_std, weight_max, weight_clipped (share of
    weights that the cap changes) and weight_ess (effective share of the samples, (sum w)^2 / (n sum
    w^2)).
    """
    mask = sampled_mask(batch)
    old, rollout = (pad(batch[name]).double() for name in ("old_log_probs", "rollout_log_probs"))
    log_ratio = zero_outside(old - rollout, mask)
    weights, changed = CORRECTIONS.find(cfg.kind)(log_ratio, mask, cfg.cap)
    metrics = _weight_metrics(weights, changed & mask, mask, reduce)
    report(metrics | mismatch_metrics(zero_outside(old, mask), zero_outside(rollout, mask), mask))
    if cfg.normalise:
        counted = mask.double()
        if cfg.kind == "sequence":
            counted = counted / counted.sum(-1, keepdim=True).clamp(min=1)
        total, count = reduce(torch.stack([(weights * counted).sum(), counted.sum()]))
        weights = weights * count / total if total > 0 else weights
    column = ragged_from_padded(weights.float(), lengths_of(batch["response_mask"]))
    return TensorDict({"rollout_weights": column}, batch_size=batch.batch_size)


Weights = tuple[Tensor, Tensor]
"""(weights, which of them the cap changed), both (B, R)."""


def by_token(log_ratio: Tensor, mask: Tensor, cap: float) -> Weights:
    """Return w_t = min(rho_t, C), C the cap, and whether rho_t > C; (B, R), 0 outside the mask.

    log_ratio: log rho_t, clamped to +-20. The cap bounds the variance and biases the tokens that it
    changes.
    """
    ratio = zero_outside(torch.exp(clamp_log_ratio(log_ratio)), mask)
    return ratio.clamp(max=cap), ratio > cap


def by_sequence(log_ratio: Tensor, mask: Tensor, cap: float) -> Weights:
    """Return w = min(prod_t rho_t, C), the same at all tokens of a response, C the cap.

    Also returns where the product is above C. Both are (B, R), 0 outside the mask. log_ratio: log
    rho_t; its sum is clamped to +-20.
    """
    total = torch.exp(clamp_log_ratio(zero_outside(log_ratio, mask).sum(-1, keepdim=True)))
    ratio = total * mask
    return ratio.clamp(max=cap), ratio > cap


def by_mask(log_ratio: Tensor, mask: Tensor, cap: float) -> Weights:
    """Return w_t = rho_t if 1/C <= rho_t <= C, otherwise 0, and where it is not; both (B, R).

    A token that differs too much does not count: double-sided masking (IcePop, Ling Team 2025).
    log_ratio: log rho_t, clamped to +-20.
    """
    ratio = zero_outside(torch.exp(clamp_log_ratio(log_ratio)), mask)
    far = (ratio > cap) | (ratio < 1 / cap)
    return ratio.masked_fill(far, 0.0), far


CORRECTIONS: Registry[Callable[[Tensor, Tensor, float], Weights]] = Registry(
    "correction", "correction.kind"
)
CORRECTIONS |= {"token": by_token, "sequence": by_sequence, "mask": by_mask}


def _weight_metrics(
    weights: Tensor, changed: Tensor, mask: Tensor, reduce: Reduce
) -> dict[str, Metric]:
    """Return mean, deviation, maximum, changed share and effective sample share of the weights.

    All but the maximum, which is this rank's, are over the masked tokens of all ranks. The
    effective share is (sum w)^2 / (n sum w^2), 0 if all weights are 0. All ranks call it together.
    """
    parts = [mask, weights, weights.square(), changed]
    sums = reduce(torch.stack([part.double().sum() for part in parts]))
    tokens, weight, square, num_changed = sums.tolist()
    tokens = max(tokens, 1.0)
    mean = weight / tokens
    return {
        "rollout/weight_mean": mean,
        "rollout/weight_std": math.sqrt(max(square / tokens - mean**2, 0.0)),
        "rollout/weight_max": Max(float(weights.max()) if weights.numel() else 0.0),
        "rollout/weight_clipped": num_changed / tokens,
        "rollout/weight_ess": weight**2 / (tokens * square) if square else 0.0,
    }


def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return metrics of the mismatch between the trainer's pi_old and the generator's mu.

    old and rollout: float64 log-probabilities (B, R), 0 outside the mask. With rho_t = pi_old(y_t)
    / mu(y_t) and l = mean_t -log of a response's token probabilities, its log-perplexity:

    - kl: mean of -log rho (k1 of KL(mu || pi_old)); trainer_kl: its k3 estimate
    - chi2_token: mean of rho^2 - 1; chi2_seq: mean over responses of (prod_t rho_t)^2 - 1 (the
    chi-square divergence of pi_old from mu)
    - ppl, log_ppl, trainer_ppl, trainer_log_ppl: means over responses of e^l and l
    - log_ppl_diff, log_ppl_diff_max, log_ppl_diff_min: mean, largest and smallest l_pi - l_mu
    - log_ppl_abs_diff, log_ppl_abs_diff_max: mean and largest |l_pi - l_mu|
    - ppl_ratio: mean of e^(l_pi - l_mu) ("When speed kills stability", Liu and Li 2025)

    Names begin with rollout/. Responses without a masked token are omitted. Logarithms are clamped
    to +-20 before exp.
    """
    log_ratio = clamp_log_ratio(old - rollout)
    tokens = float(mask.sum())
    lengths = mask.sum(-1)
    some = lengths > 0
    rows = float(some.sum())
    lengths = lengths[some].double()
    mine, other = (-x[some].sum(-1) / lengths for x in (rollout, old))  # log-perplexities
    gap = other - mine
    by_token = {
        "rollout/kl": rollout - old,
        "rollout/trainer_kl": zero_outside(kl_estimate("k3", rollout, old), mask),
        "rollout/chi2_token": zero_outside(torch.exp(2 * log_ratio) - 1, mask),
    }
    by_row = {
        "rollout/chi2_seq": torch.exp(2 * clamp_log_ratio((old - rollout)[some].sum(-1))) - 1,
        "rollout/ppl": clamp_log_ratio(mine).exp(),
        "rollout/log_ppl": mine,
        "rollout/trainer_ppl": clamp_log_ratio(other).exp(),
        "rollout/trainer_log_ppl": other,
        "rollout/log_ppl_diff": gap,
        "rollout/log_ppl_abs_diff": gap.abs(),
        "rollout/ppl_ratio": clamp_log_ratio(gap).exp(),
    }
    metrics: dict[str, Metric] = {
        name: Mean(float(x.sum()), tokens) for name, x in by_token.items()
    }
    metrics |= {name: Mean(float(x.sum()), rows) for name, x in by_row.items()}
    metrics["rollout/log_ppl_abs_diff_max"] = Max(float(gap.abs().max()) if rows else 0.0)
    if rows:
        metrics["rollout/log_ppl_diff_max"] = Max(float(gap.max()))
        metrics["rollout/log_ppl_diff_min"] = Min(float(gap.min()))
    return metrics
