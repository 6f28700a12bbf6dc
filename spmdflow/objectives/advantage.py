"""Advantages and returns from token-level rewards, with the KL to the reference in the reward.

Runs as row maths where the rows live (`batch.map(compute_advantages, ...)`); only whitening and
sums over a prompt's samples cross ranks. Estimators by name: `gae` here, those without a critic in
`critic_free`, a script's own through `@advantage("name")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.group import RowGroups
from spmdflow.data.ragged import is_ragged, lengths_of, pad, ragged_from_padded
from spmdflow.data.rows import VALID, chosen_mask, valid_rows
from spmdflow.errors import ColumnError
from spmdflow.objectives import critic_free as critic_free  # registers its estimators
from spmdflow.objectives.estimator import Samples, advantage, estimator_of
from spmdflow.objectives.kl import kl_estimate
from spmdflow.objectives.reduction import Reduce, inside, masked_sum, whiten
from spmdflow.transfer.row_maths import row_maths
from spmdflow.transfer.worker import Mean, Metric

Report = Callable[[Mapping[str, Metric]], None]


def _estimator_columns(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return estimator_of(arguments["estimator"]).reads


@row_maths(
    reads=("response_mask", "token_level_rewards"),
    reads_for=_estimator_columns,
    optional=("old_log_probs", "ref_log_probs", *VALID),
    writes=("advantages", "returns"),
    groups=True,
)
def compute_advantages(
    batch: TensorDict,
    *,
    estimator: str,
    cfg: AdvantageConfig,
    groups: RowGroups,
    reduce: Reduce,
    report: Report,
) -> TensorDict:
    """Ragged float32 advantages and returns of each row; 0 where the policy chose nothing.

    r_t = token_level_reward_t - kl_coef * KL_t, then the estimator, then whitening over the
    global batch if cfg.whiten. Rows that failed (valid is False) have 0 and are in no baseline,
    whitening or metric; 0 also has a row that is compared with others of which none is left.
    Reports reward/penalised_mean and, if the columns are there, the KL to the reference (k1):
    actor/reference_kl in nats per token, ..._per_response in nats per response. ConfigError for an
    unknown estimator, ColumnError if the KL has a weight and no columns.
    """
    lengths = lengths_of(batch["response_mask"])
    mask, valid = chosen_mask(batch), valid_rows(batch)  # (B, R), (B,)
    columns = numbers_of(batch, valid)
    columns["token_level_rewards"] = columns["token_level_rewards"] - weighted_kl(
        columns, mask, cfg
    )
    report(advantage_metrics(columns, mask, valid))
    chosen = estimator_of(estimator)
    if valid is not None:
        valid = _comparable(valid, columns, groups if chosen.groups else None)
        mask, groups, columns = mask & valid[:, None], groups.only(valid), _kept(columns, valid)
    advantages, returns = chosen.estimate(Samples(columns, mask, groups, reduce), cfg)
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


@advantage("gae", reads=("values",))
def _gae(samples: Samples, cfg: AdvantageConfig) -> tuple[Tensor, Tensor]:
    return gae(samples.rewards, samples.columns["values"], samples.mask, cfg.gamma, cfg.lam)


def numbers_of(batch: TensorDict, valid: Tensor | None = None) -> dict[str, Tensor]:
    """Columns padded to (B, R), or dense (B, ...); in float64 unless they hold integers.

    Zeros in the rows that are not valid (B,).
    """
    found = {}
    for name, column in batch.items():
        if isinstance(column, Tensor):
            values = pad(column) if is_ragged(column) else column
            found[str(name)] = values.double() if values.is_floating_point() else values
    return found if valid is None else _kept(found, valid)


def _kept(columns: Mapping[str, Tensor], valid: Tensor) -> dict[str, Tensor]:
    """The columns with zeros, whatever was there, in the rows that are not valid (B,)."""
    return {
        name: torch.where(valid.view(-1, *[1] * (x.dim() - 1)), x, torch.zeros_like(x))
        for name, x in columns.items()
    }


def _comparable(valid: Tensor, columns: Mapping[str, Tensor], groups: RowGroups | None) -> Tensor:
    """(B,) bool: valid rows that still have what they are compared with.

    A row lacks it if the greedy response that is its baseline failed (baseline_scores is nan), or
    if groups are given and all other rows of its group failed.
    """
    if "baseline_scores" in columns:
        valid = valid & ~columns["baseline_scores"].isnan()
    if groups is None:
        return valid
    drawn, left = groups.sums(torch.stack([torch.ones_like(valid), valid], -1)).unbind(-1)
    return valid & ~((drawn > 1) & (left <= 1))


def weighted_kl(columns: Mapping[str, Tensor], mask: Tensor, cfg: AdvantageConfig) -> Tensor:
    """kl_coef * KL estimate of the sampled tokens, (B, R) (Ziegler et al. 2019, eq. 2)."""
    if cfg.kl_coef == 0:
        return torch.zeros_like(columns["token_level_rewards"])
    missing = [name for name in ("old_log_probs", "ref_log_probs") if name not in columns]
    if missing:
        raise ColumnError(
            f"compute_advantages: columns {missing} are missing; expected them because "
            f"advantage.kl_coef is {cfg.kl_coef}; compute them first or set it to 0"
        )
    kl = kl_estimate(cfg.kl_estimator, columns["old_log_probs"], columns["ref_log_probs"])
    return cfg.kl_coef * inside(kl, mask)


def advantage_metrics(
    columns: Mapping[str, Tensor], mask: Tensor, valid: Tensor | None = None
) -> dict[str, Metric]:
    """Mean reward after the KL, and the KL itself if its columns are there; of valid rows (B,)."""
    rows = float(len(mask) if valid is None else valid.sum())
    metrics: dict[str, Metric] = {
        "reward/penalised_mean": Mean(float(columns["token_level_rewards"].sum()), rows)
    }
    if "old_log_probs" in columns and "ref_log_probs" in columns:
        kl = kl_estimate("k1", columns["old_log_probs"], columns["ref_log_probs"])
        total = float(masked_sum(kl, mask))
        metrics["actor/reference_kl"] = Mean(total, float(mask.sum()))
        metrics["actor/reference_kl_per_response"] = Mean(total, rows)
    return metrics
