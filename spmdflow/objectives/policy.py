"""Losses of PPO: the actor's (a policy loss by name, with entropy and KL) and the critic's."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from spmdflow.config.objective import PolicyLossConfig, ValueLossConfig
from spmdflow.data.ragged import ROW_WEIGHTS
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.objectives.kl import KL_ESTIMATORS, kl_estimate
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.objectives.loss import (
    AGGREGATIONS,
    Loss,
    Micro,
    aggregate,
    check_returned,
    masked_sum,
    zero_outside,
)
from spmdflow.objectives.surrogate import MARKED, POLICY_LOSSES, Surrogate
from spmdflow.worker_api.metric import Max, Mean, Metric


class PreUpdateMetrics:
    """Metrics of the policy before an update, from the forwards of the update's first step.

    They are the ones that `compute_log_prob` would report: actor/entropy; rollout/drift and
    drift_max if there are rollout_log_probs; actor/reference_kl (k1) per token and per response if
    with_reference and there are ref_log_probs. Sums are over a rank's rows. Only `metrics`
    synchronises with the device.
    """

    def __init__(self, *, with_reference: bool) -> None:
        self._with_reference = with_reference
        self._sums: dict[str, Tensor] = {}
        self._largest: list[Tensor] = []

    def add(self, log_probs: Tensor, entropy: Tensor, micro: Micro) -> None:
        """Add a micro-batch to the sums over the policy's tokens, on the device.

        log_probs and entropy: the trainer's, (b, R), detached. Adds the entropy, |rollout_log_probs
        - log_probs| if there are rollout_log_probs, and the k1 estimate of the KL if with_reference
        and there are ref_log_probs.
        """
        mask = micro.response_mask
        columns = micro.columns
        sums = {"tokens": mask.sum(), "rows": mask.any(-1).sum()}
        sums["actor/entropy"] = masked_sum(entropy, mask)
        if "rollout_log_probs" in columns:
            gap = zero_outside((columns["rollout_log_probs"] - log_probs).abs(), mask)
            sums["rollout/drift"] = gap.sum()
            self._largest.append(gap.max())
        if self._with_reference and "ref_log_probs" in columns:
            kl = kl_estimate("k1", log_probs.double(), columns["ref_log_probs"].double())
            sums["actor/reference_kl"] = masked_sum(kl, mask)
        for name, total in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total.double()

    def metrics(self) -> dict[str, Metric]:
        """Return this rank's metrics (see the class). Waits for the device.

        {} if nothing was added, as before the last pipeline stage.
        """
        sums = {name: float(total) for name, total in self._sums.items()}
        tokens = sums.pop("tokens", 0.0)
        rows = sums.pop("rows", 0.0)
        metrics: dict[str, Metric] = {name: Mean(total, tokens) for name, total in sums.items()}
        if "actor/reference_kl" in sums:
            total = sums["actor/reference_kl"]
            metrics["actor/reference_kl_per_response"] = Mean(total, rows)
        if self._largest:
            metrics["rollout/drift_max"] = Max(float(torch.stack(self._largest).max()))
        return metrics


LARGEST_RATIO = 2.0
"""Cap of pi / mu if old_log_probs are the generator's mu; the default of correction.cap too."""


class PolicyLoss(Loss):
    """Policy loss - entropy_coef * H + kl_coef * KL(pi || ref), all aggregated in the same way.

    Reads old_log_probs and advantages, ref_log_probs if kl_coef is not 0, and covariant if the loss
    is one of `surrogate.MARKED`. If there are rollout_weights, each token's policy loss is
    multiplied by its weight. If there are row_weights, a row counts that much in all means (1
    without them). Without old_log_probs the detached log-probs replace them, which is
    exact if a batch is a single optimizer step.

    `truncates`: old_log_probs are the generator's, so the ratio is an importance weight. It is
    capped at LARGEST_RATIO (truncated importance sampling, Espeholt et al. 2018), and
    rollout/weight_clipped is the share of capped tokens.

    budget: L of aggregation by budget, the longest response that may be generated. Metrics:
    actor/pg_loss, clip_fraction, approx_kl (k3 against old_log_probs), ratio_mean, ratio_std;
    actor/entropy if it is in the loss; actor/kl_loss if kl_coef is not 0. All but the losses are
    token means.
    """

    def __init__(self, cfg: PolicyLossConfig, temperature: float, *, budget: int = 1) -> None:
        """Raises ConfigError for an unknown name in cfg or a temperature that is not above 0."""
        AGGREGATIONS.find(cfg.chosen_aggregation)
        self._terms = POLICY_LOSSES.find(cfg.surrogate)
        KL_ESTIMATORS.find(cfg.kl_estimator, key="loss.kl_estimator")
        if not temperature > 0:
            raise ConfigError(
                f"rollout.temperature: got {temperature}; expected above 0, since log-probs are "
                f"of logits / temperature; greedy rollouts cannot train a policy, use 1.0"
            )
        self.cfg = cfg
        self.temperature = temperature
        self._budget = budget
        self.truncates = False
        """Whether old_log_probs are always the generator's (update.old_log_probs=rollout)."""
        self.before: PreUpdateMetrics | None = None
        """Collects metrics of the policy until its weights change; None after that or if unused."""

    def __call__(
        self, output: CausalOutput, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch."""
        mask = micro.response_mask
        columns = micro.columns
        totals = {**totals, "budget": totals["sequences"] * self._budget}
        log_probs, entropies = self._read(output, micro)
        if self.before is not None and entropies is not None:
            self.before.add(log_probs.detach(), entropies.detach(), micro)
        old_log_probs = zero_outside(columns.get("old_log_probs", log_probs.detach()), mask)
        advantages = zero_outside(columns["advantages"], mask)
        means = {}
        least = log_probs.detach() - math.log(LARGEST_RATIO)
        if self.truncates:
            means["rollout/weight_clipped"] = (old_log_probs < least).float()
        counted = old_log_probs.maximum(least) if self.truncates else old_log_probs
        terms = self.terms(log_probs, counted, advantages, mask, columns.get("covariant"))
        token_losses = terms.loss
        if "rollout_weights" in columns:
            token_losses = zero_outside(token_losses, mask) * zero_outside(
                columns["rollout_weights"], mask
            )
        ratio = terms.ratio.detach().double()  # float64: E[r^2] - E[r]^2 cancels near r = 1
        weights = columns.get(ROW_WEIGHTS)
        loss = aggregate(token_losses, mask, totals, self.cfg.chosen_aggregation, weights)
        metrics = {"actor/pg_loss": loss.detach()}
        means |= {
            "actor/clip_fraction": terms.clipped.float(),
            # KL(old || new) from samples of old: the roles of pi and q swap
            "actor/approx_kl": kl_estimate("k3", old_log_probs, log_probs.detach()),
            "actor/ratio_mean": ratio,
            "actor/ratio_square": ratio.square(),
        }
        for name, x in means.items():
            metrics[name] = aggregate(x, mask, totals, "token-mean", weights)
        entropy = self._entropy(entropies, micro, totals, metrics)
        kl_loss = self._kl_loss(log_probs, micro, totals, metrics)
        return loss - self.cfg.entropy_coef * entropy + self.cfg.kl_coef * kl_loss, metrics

    def terms(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        covariant: Tensor | None = None,
    ) -> Surrogate:
        """Return the policy loss of each token, its ratio and whether it is clipped; all (B, R).

        covariant: the marked tokens, which only the losses in `MARKED` read. ColumnError if such a
        loss has none, ProtocolError if a custom loss does not return three tensors (B, R).
        """
        arguments = (log_probs, old_log_probs, advantages, mask, self.cfg)
        if self.cfg.surrogate not in MARKED:
            returned = self._terms(*arguments)
            where = f"@policy_loss({self.cfg.surrogate!r})"
            return Surrogate(*check_returned(where, returned, Surrogate._fields, mask.shape))
        if covariant is None:
            got = "no column covariant"
            expected = f"it for loss.surrogate={self.cfg.surrogate}"
            do = "batch |= batch.map(mark_covariant_tokens, cfg=cfg.actor.loss, seed=step.number)"
            raise ColumnError.of("policy loss", got, expected, do)
        return Surrogate(*self._terms(*arguments, covariant.bool() & mask))

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Replace actor/ratio_square by actor/ratio_std = sqrt(E[r^2] - E[r]^2), in place."""
        square = metrics.pop("actor/ratio_square")
        metrics["actor/ratio_std"] = math.sqrt(max(square - metrics["actor/ratio_mean"] ** 2, 0.0))
        return metrics

    def _read(self, output: CausalOutput, micro: Micro) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropy of each response token, (b, R), at the temperature.

        The entropy is None if neither the loss nor `before` needs it, and detached if only `before`
        does.
        """
        in_loss = self.cfg.entropy_coef != 0
        if not in_loss and self.before is None:
            return micro.spread(output.log_probs(self.temperature)), None
        log_probs, entropy = output.log_probs_and_entropy(self.temperature)
        return micro.spread(log_probs), micro.spread(entropy if in_loss else entropy.detach())

    def _entropy(
        self,
        entropy: Tensor | None,
        micro: Micro,
        totals: Mapping[str, float],
        metrics: dict[str, Tensor],
    ) -> Tensor:
        """Return the aggregated entropy for the loss, and add its token mean to metrics in place.

        0, and no metric, if entropy_coef is 0.
        """
        if entropy is None or self.cfg.entropy_coef == 0:
            return torch.zeros((), device=micro.response_mask.device)
        mask = micro.response_mask
        weights = micro.columns.get(ROW_WEIGHTS)
        metrics["actor/entropy"] = aggregate(entropy.detach(), mask, totals, "token-mean", weights)
        return aggregate(entropy, mask, totals, self.cfg.chosen_aggregation, weights)

    def _kl_loss(
        self,
        log_probs: Tensor,
        micro: Micro,
        totals: Mapping[str, float],
        metrics: dict[str, Tensor],
    ) -> Tensor:
        """Return the aggregated KL to the reference, and add it to metrics as actor/kl_loss.

        0, and no metric, if kl_coef is 0. ColumnError if it is not 0 and there are no
        ref_log_probs.
        """
        mask = micro.response_mask
        columns = micro.columns
        if self.cfg.kl_coef == 0:
            return log_probs.new_zeros(())
        if "ref_log_probs" not in columns:
            raise ColumnError(
                f"policy loss: got columns {sorted(columns)}; expected ref_log_probs because "
                f"loss.kl_coef is {self.cfg.kl_coef}; call compute_ref_log_prob or set it to 0"
            )
        ref_log_probs = zero_outside(columns["ref_log_probs"], mask)
        kl = kl_estimate(self.cfg.kl_estimator, log_probs, ref_log_probs)
        weights = columns.get(ROW_WEIGHTS)
        kl_loss = aggregate(kl, mask, totals, self.cfg.chosen_aggregation, weights)
        metrics["actor/kl_loss"] = kl_loss.detach()
        return kl_loss


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """Return (loss, clipped), each (B, R): 1/2 max((V - R)^2, (V_clip - R)^2).

    V_clip = V_old + clip(V - V_old, -range, range) limits how far one update moves a value (the
    value clipping of PPO's reference code; Huang et al. 2022, detail 9). clipped: the clipped error
    is the larger one. clip_range None: 1/2 (V - R)^2, never clipped.
    """
    error = (values - returns).square()
    if clip_range is None:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    clipped_error = (near - returns).square()
    return torch.maximum(error, clipped_error) / 2, clipped_error > error


class ValueLoss(Loss):
    """Mean of the clipped value loss, by loss.aggregation.

    Reads values (from before the update) and returns. Metrics: critic/loss, clip_fraction,
    value_mean, return_mean, and explained_variance = 1 - Var(R - V_old) / Var(R) with the values
    from before the update (0 if the returns do not vary).
    """

    def __init__(self, cfg: ValueLossConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, output: ScalarOutput, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch."""
        old_values, returns = (
            zero_outside(micro.columns[name], micro.response_mask) for name in ("values", "returns")
        )
        values = micro.spread(output.at(micro.predicting))
        losses, clipped = clipped_value_loss(values, old_values, returns, self.cfg.clip_range)
        weights = micro.columns.get(ROW_WEIGHTS)
        loss = aggregate(losses, micro.response_mask, totals, self.cfg.aggregation, weights)
        error = (returns - old_values).double()
        target = returns.double()
        means = {
            "critic/clip_fraction": clipped.float(),
            "critic/value_mean": values.detach(),
            "critic/return_mean": target,
            "critic/return_square": target.square(),
            "critic/error_mean": error,
            "critic/error_square": error.square(),
        }
        metrics = {"critic/loss": loss.detach()} | {
            name: aggregate(x, micro.response_mask, totals, "token-mean", weights)
            for name, x in means.items()
        }
        return loss, metrics

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Replace the moments of returns and errors by critic/explained_variance, in place.

        1 - Var(R - V_old) / Var(R); 0 if Var(R) is at most 1e-12.
        """
        error = metrics.pop("critic/error_square") - metrics.pop("critic/error_mean") ** 2
        spread = metrics.pop("critic/return_square") - metrics["critic/return_mean"] ** 2
        metrics["critic/explained_variance"] = 1 - error / spread if spread > 1e-12 else 0.0
        return metrics
