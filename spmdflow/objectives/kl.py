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
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.objective import AdvantageConfig, CorrectionConfig
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
from spmdflow.transfer.worker import Max, Mean, Metric, Min

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


def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def _straight_through(value: Tensor, difference: Tensor) -> Tensor:
    slope = _k2(bounded(difference))
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
    """reference_kl (B,) float32: each response's KL to the reference in nats, k1 over its tokens.

    Reports its mean as advantage/measured_kl. A row that failed has 0 and is not in the mean.
    """
    mask = chosen_mask(batch)
    valid = valid_rows(batch)
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

    e = clip(KL / target - 1, -0.2, 0.2),  kl_coef <- kl_coef (1 + gain e)

    Ziegler et al. 2019, section 2.2, eq. 4, whose gain of 0.1 is for one update per step. Where a
    controller has a horizon (in samples), the gain is the samples of a step by the horizon.
    """

    def __init__(self, cfg: AdvantageConfig, *, target: float, gain: float = 0.1) -> None:
        """cfg.kl_coef: the weight to begin with. target: KL of a response in nats.

        ConfigError unless these and gain are above 0, and gain is below 5 (the weight stays above
        0).
        """
        if not (cfg.kl_coef > 0 and target > 0 and 0 < gain < 1 / LARGEST_ERROR):
            got = f"advantage.kl_coef {cfg.kl_coef:g}, target {target:g} and gain {gain:g}"
            expected = "all above 0, and gain below 5, as the weight is multiplied"
            raise ConfigError.of("AdaptiveKL", got, expected, "set them")
        self.value = cfg.kl_coef
        self._target = target
        self._gain = gain

    def update(self, mean_kl: float) -> None:
        """One step towards the target, by the mean KL of a batch's responses in nats."""
        error = min(max(mean_kl / self._target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= 1 + self._gain * error

    def applied_to(self, cfg: A) -> A:
        """The same settings with the weight as it is now."""
        return replace(cfg, kl_coef=self.value)


def _serving(arguments: Mapping[str, Any]) -> dict[str, str]:
    """rollout_log_probs may serve for weights of tokens, near 1; not for a response's product."""
    by_token = getattr(arguments.get("cfg"), "kind", "sequence") != "sequence"
    if by_token:
        return {"old_log_probs": "rollout_log_probs"}
    return {}


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

    With cfg.normalise the weights are divided by their mean over the tokens of all rows (over the
    rows, for weights of sequences), so that the loss keeps its scale. Reports, of the weights
    before that, over the policy's tokens of all rows: rollout/weight_mean, weight_std, weight_max,
    weight_clipped (share that the cap changes), weight_ess (effective share of the samples, (sum
    w)^2 / (n sum w^2)); and `mismatch_metrics`.
    """
    mask = chosen_mask(batch)
    old, rollout = (pad(batch[name]).double() for name in ("old_log_probs", "rollout_log_probs"))
    log_ratio = inside(old - rollout, mask)
    weights, changed = CORRECTIONS.find(cfg.kind)(log_ratio, mask, cfg.cap)
    metrics = _weight_metrics(weights, changed & mask, mask, reduce)
    report(metrics | mismatch_metrics(inside(old, mask), inside(rollout, mask), mask))
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


def _weight_metrics(
    weights: Tensor, changed: Tensor, mask: Tensor, reduce: Reduce
) -> dict[str, Metric]:
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
    """How far the trainer's pi_old is from the generator's mu: float64 log-probs (B, R), 0 outside.

    rho_t = pi_old(y_t) / mu(y_t); l = mean_t -log of a response's tokens, its log-perplexity:

    kl: mean of -log rho (k1 of KL(mu || pi_old)); trainer_kl: k3 of it; chi2_token: mean of rho^2 -
    1, chi2_seq: mean over responses of (prod_t rho_t)^2 - 1 (the chi-square divergence of pi_old
    from mu); ppl, log_ppl, trainer_ppl, trainer_log_ppl: means over responses of e^l and l;
    log_ppl_diff, log_ppl_diff_max, log_ppl_diff_min: mean, largest and smallest l_pi - l_mu;
    log_ppl_abs_diff, log_ppl_abs_diff_max: of its absolute value; ppl_ratio: mean of e to its power
    ("When speed kills stability", Liu and Li 2025).
    """
    log_ratio = bounded(old - rollout)
    tokens = float(mask.sum())
    lengths = mask.sum(-1)
    some = lengths > 0
    rows = float(some.sum())
    lengths = lengths[some].double()
    mine, other = (-x[some].sum(-1) / lengths for x in (rollout, old))  # log-perplexities
    gap = other - mine
    by_token = {
        "rollout/kl": rollout - old,
        "rollout/trainer_kl": inside(kl_estimate("k3", rollout, old), mask),
        "rollout/chi2_token": inside(torch.exp(2 * log_ratio) - 1, mask),
    }
    by_row = {
        "rollout/chi2_seq": torch.exp(2 * bounded((old - rollout)[some].sum(-1))) - 1,
        "rollout/ppl": bounded(mine).exp(),
        "rollout/log_ppl": mine,
        "rollout/trainer_ppl": bounded(other).exp(),
        "rollout/trainer_log_ppl": other,
        "rollout/log_ppl_diff": gap,
        "rollout/log_ppl_abs_diff": gap.abs(),
        "rollout/ppl_ratio": bounded(gap).exp(),
    }
    found: dict[str, Metric] = {name: Mean(float(x.sum()), tokens) for name, x in by_token.items()}
    found |= {name: Mean(float(x.sum()), rows) for name, x in by_row.items()}
    found["rollout/log_ppl_abs_diff_max"] = Max(float(gap.abs().max()) if rows else 0.0)
    if rows:
        found["rollout/log_ppl_diff_max"] = Max(float(gap.max()))
        found["rollout/log_ppl_diff_min"] = Min(float(gap.min()))
    return found
