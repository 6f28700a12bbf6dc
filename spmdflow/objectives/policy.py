"""The actor's loss: a policy loss by name with optional entropy bonus and KL penalty."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import PolicyLossConfig
from spmdflow.data.ragged import pad
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.objectives.kl import KL_ESTIMATORS, kl_estimate
from spmdflow.objectives.log_prob import entropy_from_logits, log_probs_from_logits
from spmdflow.objectives.loss import Micro
from spmdflow.objectives.reduction import aggregate, aggregation, inside, mask_totals
from spmdflow.objectives.surrogate import Surrogate, policy_terms_of


class PolicyLoss:
    """Policy loss - entropy_coef * H + kl_coef * KL(pi || ref), all aggregated alike.

    Reads old_log_probs and advantages, and ref_log_probs if kl_coef is not 0; if rollout_weights
    are there, each token's policy loss is multiplied by its weight. budget: the L of aggregation
    by budget, the longest response that may be generated. Metrics:
    actor/pg_loss, clip_fraction, approx_kl (k3 against old_log_probs), ratio_mean, ratio_std;
    actor/entropy if it is in the loss or report_entropy (costs a pass over the logits);
    actor/kl_loss if kl_coef is not 0. All but the losses are token means.
    """

    def __init__(
        self,
        cfg: PolicyLossConfig,
        temperature: float,
        *,
        budget: int = 1,
        report_entropy: bool = False,
    ) -> None:
        aggregation(cfg.aggregation)
        self._terms = policy_terms_of(cfg.surrogate)
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
        self.cfg, self.temperature, self._budget = cfg, temperature, budget
        self.report_entropy = report_entropy

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Local "tokens" and "sequences" of response_mask."""
        return mask_totals(pad(batch["response_mask"]).sum(-1))

    def __call__(
        self, output: Tensor, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch; output: logits (b, T, V)."""
        mask, columns = micro.response_mask, micro.columns
        totals = {**totals, "budget": totals["sequences"] * self._budget}
        log_probs = micro.gather(
            log_probs_from_logits(output, micro.next_ids, self.temperature)
        )  # (b, T) -> (b, R)
        old_log_probs, advantages = (
            inside(columns[name], mask) for name in ("old_log_probs", "advantages")
        )
        terms = self.terms(log_probs, old_log_probs, advantages, mask)
        token_losses = terms.loss
        if "rollout_weights" in columns:
            token_losses = inside(token_losses, mask) * inside(columns["rollout_weights"], mask)
        loss = aggregate(token_losses, mask, totals, self.cfg.aggregation)
        metrics = {"actor/pg_loss": loss.detach()}
        with torch.no_grad():
            metrics |= self._token_means(terms, log_probs, old_log_probs, mask, totals)
        entropy = self._entropy(output, micro, totals, metrics)
        kl_loss = self._kl_loss(log_probs, columns, mask, totals, metrics)
        return loss - self.cfg.entropy_coef * entropy + self.cfg.kl_coef * kl_loss, metrics

    def terms(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> Surrogate:
        """The policy loss of each token, all (B, R)."""
        return Surrogate(*self._terms(log_probs, old_log_probs, advantages, mask, self.cfg))

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
