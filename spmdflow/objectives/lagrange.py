"""PPO-Lagrangian: reward under a limit on the expected cost (Dai et al. 2024, section 3.3).

min_pi max_{lambda >= 0}  -J_R(pi) + lambda * J_C(pi),   J_C = E[cost] - limit

The policy's advantage mixes both signals with the multiplier lambda, and lambda follows the cost:
it grows while the limit is exceeded and shrinks while it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import LagrangeConfig
from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.ragged import lengths_of, ragged_from_padded
from spmdflow.data.rows import VALID, chosen_mask, valid_rows
from spmdflow.objectives.advantage import (
    Report,
    advantage_metrics,
    gae,
    numbers_of,
    weighted_kl,
)
from spmdflow.objectives.reduction import Reduce, whiten
from spmdflow.transfer.row_maths import row_maths


@row_maths(
    reads=("response_mask", "token_level_rewards", "token_level_costs", "values", "cost_values"),
    optional=("old_log_probs", "ref_log_probs", *VALID),
    writes=("advantages", "returns", "cost_returns"),
)
def compute_safe_advantages(
    batch: TensorDict, *, multiplier: float, cfg: AdvantageConfig, reduce: Reduce, report: Report
) -> TensorDict:
    """Ragged float32 advantages of reward and cost together, and the returns of each.

    The KL to the reference is shared between both signals, r_t - kl/2 and c_t + kl/2 with
    kl = kl_coef * KL_t (ibid., appendix B); each has its own GAE, and the mixture is whitened over
    the global batch if cfg.whiten.
    """
    lengths = lengths_of(batch["response_mask"])
    mask, valid = chosen_mask(batch), valid_rows(batch)  # (B, R), (B,)
    columns = numbers_of(batch, valid)
    half_kl = weighted_kl(columns, mask, cfg) / 2
    columns["token_level_rewards"] = columns["token_level_rewards"] - half_kl
    costs = columns["token_level_costs"] + half_kl
    ours = cfg.gamma, cfg.lam
    rewarded, returns = gae(columns["token_level_rewards"], columns["values"], mask, *ours)
    costly, cost_returns = gae(costs, columns["cost_values"], mask, *ours)
    advantages = lagrangian(rewarded, costly, multiplier)
    report(advantage_metrics(columns, mask, valid))
    if cfg.whiten:
        advantages = whiten(advantages, mask, reduce)
    made = {"advantages": advantages, "returns": returns, "cost_returns": cost_returns}
    ragged = {name: ragged_from_padded(x.float(), lengths) for name, x in made.items()}
    return TensorDict(ragged, batch_size=[len(lengths)])


def lagrangian(advantages: Tensor, cost_advantages: Tensor, multiplier: float) -> Tensor:
    """A_t = (A_t^r - lambda A_t^c) / (1 + lambda) (Dai et al. 2024, appendix B)."""
    return (advantages - multiplier * cost_advantages) / (1 + multiplier)


def next_multiplier(multiplier: float, mean_cost: float, cfg: LagrangeConfig) -> float:
    """ln lambda' = ln lambda + lr * lambda * (mean_cost - limit), lambda' at most cfg.largest.

    Gradient ascent on lambda J_C in ln lambda, so lambda stays positive (ibid., eq. 30). The
    exponent is clamped to +-20.
    """
    step = cfg.lr * multiplier * (mean_cost - cfg.limit)
    return min(multiplier * math.exp(min(max(step, -20.0), 20.0)), cfg.largest)


class LagrangeMultiplier:
    """lambda, which resumes with the run: `flow.keep(multiplier=LagrangeMultiplier(cfg))`."""

    def __init__(self, cfg: LagrangeConfig) -> None:
        self._cfg = cfg
        self.value = min(cfg.initial, cfg.largest)

    def update(self, mean_cost: float) -> None:
        """One ascent step on the mean cost of a batch."""
        self.value = next_multiplier(self.value, mean_cost, self._cfg)

    def state_dict(self) -> dict[str, float]:
        """Its value."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with the value of `state_dict`."""
        self.value = state["value"]
