"""Advantages and returns from token-level rewards, with the KL to the reference in the reward.

Runs as row maths where the rows live (`batch.map(compute_advantages, ...)`); only whitening needs
sums over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.ragged import lengths_of, pad, ragged_from_padded
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.objectives.kl import kl_estimate
from spmdflow.objectives.reduction import Reduce, inside, masked_sum, whiten
from spmdflow.transfer.row_maths import row_maths
from spmdflow.transfer.worker import Mean, Metric

Report = Callable[[Mapping[str, Metric]], None]
Estimator = Callable[[Mapping[str, Tensor], Tensor, AdvantageConfig], tuple[Tensor, Tensor]]
"""(padded float64 columns (B, R), mask (B, R), cfg) -> advantages, returns, both (B, R)."""


@row_maths(
    reads=("response_mask", "token_level_rewards", "values"),
    optional=("old_log_probs", "ref_log_probs"),
    writes=("advantages", "returns"),
)
def compute_advantages(
    batch: TensorDict, *, estimator: str, cfg: AdvantageConfig, reduce: Reduce, report: Report
) -> TensorDict:
    """Ragged float32 advantages and returns of each row; 0 where the policy chose nothing.

    r_t = token_level_reward_t - kl_coef * KL_t, then the estimator, then whitening over the
    global batch if cfg.whiten. Reports reward/penalised_mean and, if the columns are there, the KL
    to the reference (k1): actor/reference_kl in nats per token, ..._per_response in nats per
    response. ConfigError for an unknown estimator, ColumnError if the KL has a weight and no
    columns.
    """
    if estimator not in ADVANTAGE_ESTIMATORS:
        raise ConfigError(
            f"advantage.estimator: got {estimator!r}; expected one of "
            f"{sorted(ADVANTAGE_ESTIMATORS)}; choose one"
        )
    lengths = lengths_of(batch["response_mask"])
    mask = pad(batch["response_mask"])  # (B, R)
    columns = {
        name: pad(batch[name]).double()  # (B, R)
        for name in _COLUMNS
        if name in batch.keys()
    }
    columns["token_level_rewards"] = _penalised(columns, mask, cfg)
    advantages, returns = ADVANTAGE_ESTIMATORS[estimator](columns, mask, cfg)
    report(_metrics(columns, mask))
    if cfg.whiten:
        advantages = whiten(advantages, mask, reduce)
    ragged = {
        "advantages": ragged_from_padded(advantages.float(), lengths),
        "returns": ragged_from_padded(returns.float(), lengths),
    }
    return TensorDict(ragged, batch_size=[len(lengths)])


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): advantages, returns.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V_t,
    with V = A = 0 after the last token. Places outside the mask (observations between the
    policy's tokens) take no time: the next value and advantage pass over them undiscounted, and
    a reward there belongs to the policy's token before. All (B, R); results 0 outside the mask.
    """
    advantages = torch.zeros_like(values)
    next_value = next_advantage = pending = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        chosen, reward = mask[:, t], rewards[:, t] + pending
        delta = reward + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(chosen, advantage, 0.0)
        next_value = torch.where(chosen, values[:, t], next_value)
        next_advantage = torch.where(chosen, advantage, next_advantage)
        pending = torch.where(chosen, 0.0, reward)
    return advantages, torch.where(mask, advantages + values, 0.0)


def _gae(
    columns: Mapping[str, Tensor], mask: Tensor, cfg: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    rewards, values = columns["token_level_rewards"], columns["values"]
    return gae(rewards, values, mask, cfg.gamma, cfg.lam)


ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {"gae": _gae}

_COLUMNS = ("token_level_rewards", "values", "old_log_probs", "ref_log_probs")


def _penalised(columns: Mapping[str, Tensor], mask: Tensor, cfg: AdvantageConfig) -> Tensor:
    """Rewards minus kl_coef * KL estimate of the sampled tokens (Ziegler et al. 2019, eq. 2)."""
    rewards = columns["token_level_rewards"]
    if cfg.kl_coef == 0:
        return rewards
    missing = [name for name in ("old_log_probs", "ref_log_probs") if name not in columns]
    if missing:
        raise ColumnError(
            f"compute_advantages: columns {missing} are missing; expected them because "
            f"advantage.kl_coef is {cfg.kl_coef}; compute them first or set it to 0"
        )
    kl = kl_estimate(cfg.kl_estimator, columns["old_log_probs"], columns["ref_log_probs"])
    return rewards - cfg.kl_coef * inside(kl, mask)


def _metrics(columns: Mapping[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    rows = float(len(mask))
    metrics: dict[str, Metric] = {
        "reward/penalised_mean": Mean(float(columns["token_level_rewards"].sum()), rows)
    }
    if "old_log_probs" in columns and "ref_log_probs" in columns:
        kl = kl_estimate("k1", columns["old_log_probs"], columns["ref_log_probs"])
        total = float(masked_sum(kl, mask))
        metrics["actor/reference_kl"] = Mean(total, float(mask.sum()))
        metrics["actor/reference_kl_per_response"] = Mean(total, rows)
    return metrics
