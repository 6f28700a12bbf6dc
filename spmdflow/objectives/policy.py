"""PPO's clipped surrogate with optional entropy bonus and KL penalty (Schulman et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import PolicyLossConfig
from spmdflow.data.ragged import pad
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.objectives.kl import KL_ESTIMATORS, bounded, kl_estimate
from spmdflow.objectives.log_prob import entropy_from_logits, log_probs_from_logits
from spmdflow.objectives.loss import Micro
from spmdflow.objectives.reduction import aggregate, aggregation, inside, mask_totals


class Surrogate(NamedTuple):
    """Per-token terms of the clipped surrogate, each (B, R)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """bool: the clip is what counts, so the token's gradient is zero."""


def clipped_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_ratio: float
) -> Surrogate:
    """-min(r A, clip(r, 1 - eps, 1 + eps) A) with r = pi / pi_old (PPO, eq. 7).

    The log-ratio is clamped to +-20, so r stays finite; all shapes (B, R).
    """
    ratio = torch.exp(bounded(log_probs - old_log_probs))
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return Surrogate(torch.maximum(free, held), ratio, held > free)


class PolicyLoss:
    """Clipped surrogate - entropy_coef * H + kl_coef * KL(pi || ref), all aggregated alike.

    Reads old_log_probs and advantages, and ref_log_probs if kl_coef is not 0. Metrics:
    actor/pg_loss, clip_fraction, approx_kl (k3 against old_log_probs), ratio_mean, ratio_std;
    actor/entropy if it is in the loss or report_entropy (costs a pass over the logits);
    actor/kl_loss if kl_coef is not 0. All but the losses are token means.
    """

    def __init__(
        self, cfg: PolicyLossConfig, temperature: float, *, report_entropy: bool = False
    ) -> None:
        aggregation(cfg.aggregation)
        if cfg.kl_estimator not in KL_ESTIMATORS:
            raise ConfigError(
                f"loss.kl_estimator: got {cfg.kl_estimator!r}; expected one of "
                f"{sorted(KL_ESTIMATORS)}; choose one"
            )
        if not temperature > 0:
            raise ConfigError(
                f"rollout.temperature: got {temperature}; expected above 0, since log-probs are "
                f"of logits / temperature; greedy rollouts cannot train a policy, use 1.0"
            )
        self.cfg, self.temperature = cfg, temperature
        self.report_entropy = report_entropy

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Local "tokens" and "sequences" of response_mask."""
        return mask_totals(pad(batch["response_mask"]).sum(-1))

    def __call__(
        self, output: Tensor, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch; output: logits (b, T, V)."""
        mask, columns = micro.response_mask, micro.columns
        log_probs = micro.gather(
            log_probs_from_logits(output, micro.next_ids, self.temperature)
        )  # (b, T) -> (b, R)
        old_log_probs, advantages = (
            inside(columns[name], mask) for name in ("old_log_probs", "advantages")
        )
        terms = clipped_surrogate(log_probs, old_log_probs, advantages, self.cfg.clip_ratio)
        loss = aggregate(terms.loss, mask, totals, self.cfg.aggregation)
        metrics = {"actor/pg_loss": loss.detach()}
        with torch.no_grad():
            metrics |= self._token_means(terms, log_probs, old_log_probs, mask, totals)
        entropy = self._entropy(output, micro, totals, metrics)
        kl_loss = self._kl_loss(log_probs, columns, mask, totals, metrics)
        return loss - self.cfg.entropy_coef * entropy + self.cfg.kl_coef * kl_loss, metrics

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Turn the ratio's second moment into its standard deviation."""
        square = metrics.pop("actor/ratio_square")
        metrics["actor/ratio_std"] = math.sqrt(max(square - metrics["actor/ratio_mean"] ** 2, 0.0))
        return metrics

    def _token_means(
        self,
        terms: Surrogate,
        log_probs: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        totals: Mapping[str, float],
    ) -> dict[str, Tensor]:
        ratio = terms.ratio.double()  # float64: E[r^2] - E[r]^2 cancels near r = 1
        means = {
            "actor/clip_fraction": terms.clipped.float(),
            # KL(old || new) from samples of old: the roles of pi and q swap
            "actor/approx_kl": kl_estimate("k3", old_log_probs, log_probs),
            "actor/ratio_mean": ratio,
            "actor/ratio_square": ratio.square(),
        }
        return {name: aggregate(x, mask, totals, "token-mean") for name, x in means.items()}

    def _entropy(
        self, logits: Tensor, micro: Micro, totals: Mapping[str, float], metrics: dict[str, Tensor]
    ) -> Tensor:
        """Aggregated entropy, 0 if it is not in the loss; adds the token mean to metrics."""
        in_loss = self.cfg.entropy_coef != 0
        if not (in_loss or self.report_entropy):
            return torch.zeros((), device=micro.response_mask.device)
        with torch.set_grad_enabled(in_loss):
            entropy = micro.gather(entropy_from_logits(logits, self.temperature))
        mask = micro.response_mask
        metrics["actor/entropy"] = aggregate(entropy.detach(), mask, totals, "token-mean")
        return aggregate(entropy, mask, totals, self.cfg.aggregation)

    def _kl_loss(
        self,
        log_probs: Tensor,
        columns: Mapping[str, Tensor],
        mask: Tensor,
        totals: Mapping[str, float],
        metrics: dict[str, Tensor],
    ) -> Tensor:
        if self.cfg.kl_coef == 0:
            return log_probs.new_zeros(())
        if "ref_log_probs" not in columns:
            raise ColumnError(
                f"policy loss: got columns {sorted(columns)}; expected ref_log_probs because "
                f"loss.kl_coef is {self.cfg.kl_coef}; call compute_ref_log_prob or set it to 0"
            )
        ref_log_probs = inside(columns["ref_log_probs"], mask)
        kl = kl_estimate(self.cfg.kl_estimator, log_probs, ref_log_probs)
        kl_loss = aggregate(kl, mask, totals, self.cfg.aggregation)
        metrics["actor/kl_loss"] = kl_loss.detach()
        return kl_loss
