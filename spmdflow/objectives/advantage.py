"""Map functions over scored rows, before the update: advantages, returns, reward penalties.

The functions run on the ranks that hold the rows (`batch.map(compute_advantages, ...)`). Only
whitening and sums over a prompt's samples communicate between ranks. The estimators are in
`estimator`.

`compute_safe_advantages` and `LagrangeMultiplier` implement PPO-Lagrangian, which maximises the
reward under a limit on the expected cost (Dai et al. 2024, section 3.3):

min_pi max_{lambda >= 0}  -J_R(pi) + lambda * J_C(pi),   J_C = E[cost] - limit

The policy's advantage mixes both signals with the multiplier lambda, which grows while the limit
is exceeded and shrinks while it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import LagrangeConfig, OverlongConfig
from spmdflow.config.objective import AdvantageConfig
from spmdflow.data.ragged import (
    ROW_WEIGHTS,
    VALID,
    is_ragged,
    lengths_of,
    pad,
    ragged,
    ragged_from_padded,
    sampled_mask,
    valid_rows,
)
from spmdflow.data.row_id import RowGroups
from spmdflow.errors import ColumnError
from spmdflow.objectives.estimator import ESTIMATORS, Samples, gae
from spmdflow.objectives.kl import ResumableNumber, kl_estimate
from spmdflow.objectives.loss import (
    Reduce,
    Report,
    check_returned,
    masked_sum,
    whiten,
    zero_outside,
)
from spmdflow.worker_api.metric import Mean, Metric
from spmdflow.worker_api.register import map_function


def _columns_of_penalty(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the column that advantages need if the KL in the reward has a weight."""
    return ("ref_log_probs",) if arguments["cfg"].kl_coef else ()


def _columns_of_advantages(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that `compute_advantages` needs for its estimator and its KL penalty."""
    return (
        *ESTIMATORS.find(arguments["estimator"]).reads,
        *_columns_of_penalty(arguments),
    )


@map_function(
    reads=("response_mask", "token_level_rewards"),
    reads_for=_columns_of_advantages,
    optional=("old_log_probs", "ref_log_probs", "rollout_weights", ROW_WEIGHTS, *VALID),
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
    """Return advantages and returns: ragged float32, 0 at tokens that the policy did not choose.

    The estimator gets the rewards r_t = token_level_reward_t - kl_coef * KL_t. Its advantages are
    whitened over the global batch if cfg.whiten. Rows that failed (valid is False) get 0 and are in
    no baseline, whitening or metric. A row also gets 0 if its baseline is missing because other
    rows failed. With row_weights (`Batch.segments`) a row counts that much in its baseline.

    Reports reward/penalised_mean and, if the columns are there, the KL to the reference (k1):
    actor/reference_kl in nats per token, ..._per_response in nats per response. Raises ConfigError
    for an unknown estimator, and ColumnError if kl_coef is not 0 and a column of the KL is missing.
    """
    lengths = lengths_of(batch["response_mask"])
    # (B, R), (B,)
    mask = sampled_mask(batch)
    valid = valid_rows(batch)
    if ROW_WEIGHTS in batch.keys():
        groups = replace(groups, weights=batch[ROW_WEIGHTS].double())
    columns = numbers_of(batch, valid)
    columns["token_level_rewards"] = columns["token_level_rewards"] - weighted_kl(
        columns, mask, cfg
    )
    report(advantage_metrics(columns, mask, valid))
    chosen = ESTIMATORS.find(estimator)
    if valid is not None:
        valid = _find_comparable_rows(valid, columns, groups if chosen.groups else None)
        mask = mask & valid[:, None]
        groups = groups.only(valid)
        columns = _zero_failed_rows(columns, valid)
    estimates = chosen.estimate(Samples(columns, mask, groups, reduce), cfg)
    where = f"@advantage({estimator!r})"
    names = ("advantages", "returns")
    advantages, returns = check_returned(where, estimates, names, mask.shape)
    if cfg.whiten:
        advantages = whiten(advantages, mask, reduce, batch.get(ROW_WEIGHTS))
    return _make_ragged({"advantages": advantages, "returns": returns}, lengths)


def _make_ragged(columns: Mapping[str, Tensor], lengths: Tensor) -> TensorDict:
    """Convert columns (B, R) to ragged float32 columns with these row lengths."""
    ragged_columns = {}
    for name, x in columns.items():
        ragged_columns[name] = ragged_from_padded(x.float(), lengths)
    return TensorDict(ragged_columns, batch_size=[len(lengths)])


def numbers_of(batch: TensorDict, valid: Tensor | None = None) -> dict[str, Tensor]:
    """Return the tensor columns by name: ragged ones padded with 0 to (B, R), floats as float64.

    valid (B,): rows where it is False get zeros in every column. None: all rows are left as they
    are.
    """
    numbers = {}
    for name, column in batch.items():
        if isinstance(column, Tensor):
            values = pad(column) if is_ragged(column) else column
            numbers[str(name)] = values.double() if values.is_floating_point() else values
    if valid is None:
        return numbers
    return _zero_failed_rows(numbers, valid)


def _zero_failed_rows(columns: Mapping[str, Tensor], valid: Tensor) -> dict[str, Tensor]:
    """Return the columns with zeros, even instead of nan, in rows where valid (B,) is False."""
    result = {}
    for name, x in columns.items():
        result[name] = torch.where(valid.view(-1, *[1] * (x.dim() - 1)), x, torch.zeros_like(x))
    return result


def _find_comparable_rows(
    valid: Tensor, columns: Mapping[str, Tensor], groups: RowGroups | None
) -> Tensor:
    """Return which valid rows have a baseline, (B,) bool.

    A row has none if the greedy response that it is compared with failed (baseline_scores is nan).
    It also has none if groups are given, its group has several rows, and all others of them failed.
    With groups, all ranks that share the batch call it together.
    """
    if "baseline_scores" in columns:
        valid = valid & ~columns["baseline_scores"].isnan()
    if groups is None:
        return valid
    counts = groups.sums(torch.stack([torch.ones_like(valid), valid], -1))
    drawn, left = counts.round(decimals=6).unbind(-1)  # thirds of an episode add up to one
    return valid & ~((drawn > 1) & (left <= 1))


def weighted_kl(columns: Mapping[str, Tensor], mask: Tensor, cfg: AdvantageConfig) -> Tensor:
    """Return kl_coef * KL estimate of each token, (B, R), 0 outside the mask.

    The estimator is cfg.kl_estimator on old_log_probs and ref_log_probs (Ziegler et al. 2019, eq.
    2). Zeros if kl_coef is 0, otherwise ColumnError if one of these columns is missing.
    """
    if cfg.kl_coef == 0:
        return torch.zeros_like(columns["token_level_rewards"])
    missing = []
    for name in ("old_log_probs", "ref_log_probs"):
        if name not in columns:
            missing.append(name)
    if missing:
        raise ColumnError(
            f"compute_advantages: columns {missing} are missing; expected them because "
            f"advantage.kl_coef is {cfg.kl_coef}; compute them first or set it to 0"
        )
    kl = kl_estimate(cfg.kl_estimator, columns["old_log_probs"], columns["ref_log_probs"])
    return cfg.kl_coef * zero_outside(kl, mask)


def advantage_metrics(
    columns: Mapping[str, Tensor], mask: Tensor, valid: Tensor | None = None
) -> dict[str, Metric]:
    """Return the mean reward per row and, if its columns are there, the KL (k1) to the reference.

    Names: reward/penalised_mean (rewards as passed, minus the penalty), actor/reference_kl per
    token in the mask, actor/reference_kl_per_response. Means over rows count the valid rows (B,).
    """
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


@map_function(
    reads=("response_mask", "token_level_rewards", "token_level_costs", "values", "cost_values"),
    reads_for=_columns_of_penalty,
    optional=("old_log_probs", "ref_log_probs", *VALID),
    writes=("advantages", "returns", "cost_returns"),
)
def compute_safe_advantages(
    batch: TensorDict, *, multiplier: float, cfg: AdvantageConfig, reduce: Reduce, report: Report
) -> TensorDict:
    """Return advantages (reward and cost combined), returns and cost_returns, ragged float32.

    The KL to the reference is split between both signals, r_t - kl/2 and c_t + kl/2 with kl =
    kl_coef * KL_t (Dai et al. 2024, appendix B). Each signal has its own GAE. The combined
    advantage, (A_r - multiplier A_c) / (1 + multiplier), is whitened over the global batch if
    cfg.whiten. All are 0 at failed rows. Reports the same metrics as `compute_advantages`.
    ColumnError if kl_coef is not 0 and a column of the KL is missing.
    """
    lengths = lengths_of(batch["response_mask"])
    # (B, R), (B,)
    mask = sampled_mask(batch)
    valid = valid_rows(batch)
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
    results = {"advantages": advantages, "returns": returns, "cost_returns": cost_returns}
    return _make_ragged(results, lengths)


def lagrangian(advantages: Tensor, cost_advantages: Tensor, multiplier: float) -> Tensor:
    """A_t = (A_t^r - lambda A_t^c) / (1 + lambda) (Dai et al. 2024, appendix B)."""
    return (advantages - multiplier * cost_advantages) / (1 + multiplier)


class LagrangeMultiplier(ResumableNumber):
    """lambda, saved and restored with the run: `flow.keep(multiplier=LagrangeMultiplier(cfg))`.

    ln lambda' = ln lambda + lr * lambda * (mean_cost - limit), lambda' at most cfg.largest:
    gradient ascent on lambda J_C in ln lambda, so lambda stays positive (Dai et al. 2024, eq. 30).
    The exponent is clamped to +-20.
    """

    def __init__(self, cfg: LagrangeConfig) -> None:
        self._cfg = cfg
        self.value = min(cfg.initial, cfg.largest)

    def update(self, mean_cost: float) -> None:
        """One ascent step on the mean cost of a batch."""
        step = self._cfg.lr * self.value * (mean_cost - self._cfg.limit)
        self.value = min(self.value * math.exp(min(max(step, -20.0), 20.0)), self._cfg.largest)


@map_function(
    reads=("response_mask", "old_log_probs", "ref_log_probs"),
    writes=("token_level_rewards",),
)
def compute_teacher_rewards(batch: TensorDict, *, reduce: Reduce, report: Report) -> TensorDict:
    """Return token_level_rewards: r_t = log pi_teacher(y_t) - log pi(y_t), ragged.

    It is 0 at tokens that the policy did not choose. On samples of the policy, -r_t estimates KL(pi
    || pi_teacher) (k1), so a policy gradient with these rewards reduces this KL: on-policy
    distillation (Agarwal et al. 2024, arXiv 2306.13649; Lu and Thinking Machines 2025, "On-policy
    distillation"). ref_log_probs are the teacher's, old_log_probs the policy's.
    """
    mask = pad(batch["response_mask"])
    policy, teacher = (pad(batch[name]) for name in ("old_log_probs", "ref_log_probs"))
    gaps = torch.where(mask, teacher - policy, 0.0)
    column = ragged_from_padded(gaps, lengths_of(batch["response_mask"]))
    return TensorDict({"token_level_rewards": column}, batch_size=batch.batch_size)


def overlong_penalty(num_tokens: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """R(y) of DAPO (Yu et al. 2025, eq. 13), for responses of |y| = num_tokens tokens, in [-1, 0].

    With L = max_tokens and C = buffer_tokens: 0 up to |y| = L - C, (L - C - |y|) / C up to L, -1
    beyond. With C = 0 only |y| > L is penalised.
    """
    beyond = num_tokens - (max_tokens - buffer_tokens)
    return -(beyond.double() / max(buffer_tokens, 1)).clamp(0, 1)


@map_function(reads=("token_level_rewards",), optional=VALID, writes=("token_level_rewards",))
def add_overlong_penalty(
    batch: TensorDict, *, cfg: OverlongConfig, max_tokens: int, reduce: Reduce, report: Report
) -> TensorDict:
    """Return token_level_rewards with weight * R(y) added at each row's last token.

    R is `overlong_penalty` of the row's length. Empty rows do not change. Reports reward/overlong,
    the mean of weight * R(y) over the rows that did not fail.
    """
    rewards = batch["token_level_rewards"]
    lengths = lengths_of(rewards)
    penalty = cfg.weight * overlong_penalty(
        lengths, max_tokens=max_tokens, buffer_tokens=cfg.buffer_tokens
    )
    values = rewards.values().clone()
    ends = torch.cumsum(lengths, 0) - 1
    some = lengths > 0
    values[ends[some]] += penalty[some].to(values.dtype)
    valid = valid_rows(batch)
    counted = penalty if valid is None else penalty[valid]
    report({"reward/overlong": Mean(float(counted.sum()), float(len(counted)))})
    return TensorDict({"token_level_rewards": ragged(values, lengths)}, batch.batch_size)


@map_function(reads=("scores",), writes=("baseline_scores",))
def as_baseline(batch: TensorDict, *, reduce: Reduce, report: Report) -> TensorDict:
    """baseline_scores (B,): the scores, under the name that the estimator `remax` reads.

    Li et al. 2024: the score of the greedy response, b(x) = r(x, argmax_y pi(y | x)).
    """
    return TensorDict({"baseline_scores": batch["scores"]}, batch_size=batch.batch_size)
