"""A batch with rows that failed learns what the same batch learns without them: every estimator,
every loss, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import CorrectionConfig, OverlongConfig, SurrogateLossConfig
from spmdflow.config.schema import AdvantageConfig, ValueLossConfig
from spmdflow.data.ragged import lengths_of, ragged, rows_of, select_rows, without_failed
from spmdflow.data.row_id import RowGroups, positions_in_groups
from spmdflow.objectives import estimator as registry
from spmdflow.objectives.advantage import (
    add_overlong_penalty,
    compute_advantages,
    compute_safe_advantages,
)
from spmdflow.objectives.kl import compute_rollout_weights, measure_kl
from spmdflow.objectives.loss import AGGREGATIONS
from spmdflow.objectives.policy import PolicyLoss, ValueLoss
from spmdflow.tracking.metric import merge
from tests.unit.objectives.test_layout import VOCAB, make, step
from tests.unit.threaded_ranks import run_ranks

GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 4]
FAILED = [1, 7, 8, 11, 12]
"""Group 0 has three rows left, group 1 all, group 2 one of three, group 3 its one, group 4 none."""
ALONE = 9
LEFT = [row for row in range(len(GROUPS)) if row not in FAILED]
ESTIMATORS = [
    name
    for name, known in registry.ESTIMATORS.items()
    if known.estimate.__module__.startswith("spmdflow")
]
CFG = AdvantageConfig(whiten=False, gamma=0.95, kl_coef=0.1)
Report = dict[str, Any]


def batch_of_all() -> TensorDict:
    """Random rows with every column that an estimator reads."""
    batch = make(3, len(GROUPS))
    count = len(GROUPS)
    lengths = lengths_of(batch["responses"])
    generator = torch.Generator().manual_seed(4)
    for name in ("token_level_rewards", "token_level_costs", "values", "cost_values"):
        batch[name] = ragged(torch.randn(int(lengths.sum()), generator=generator), lengths)
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
        noise = 0.3 * torch.randn(int(lengths.sum()), generator=generator)
        batch[name] = ragged(noise - 2.4, lengths)
    batch["baseline_scores"] = torch.randn(count, generator=generator)
    squared = batch["old_log_probs"].values().exp().square() + 0.1
    batch["squared_probs"] = ragged(squared, lengths)
    return batch.exclude("is_text", "desirable", "ref_answer_log_probs", "kl_log_ratios")


def with_failed(batch: TensorDict) -> TensorDict:
    """The same rows, some of which the reward function failed on: they have no score."""
    failed = torch.zeros(len(GROUPS), dtype=torch.bool)
    lengths = lengths_of(batch["responses"])
    failed[FAILED] = True
    damaged = batch.clone()
    for name in ("token_level_rewards", "token_level_costs"):
        values = batch[name].values().masked_fill(failed.repeat_interleave(lengths), torch.nan)
        damaged[name] = ragged(values, lengths)
    damaged["valid"] = ~failed
    return damaged


def estimated(
    batch: TensorDict, name: str, rows: list[int], num_ranks: int, cfg: AdvantageConfig = CFG
) -> tuple[TensorDict, Report]:
    """compute_advantages of these rows of the batch, dealt out to ranks in turn; rows in order."""
    shares = [rows[rank::num_ranks] for rank in range(num_ranks)]
    numbers = {group: i for i, group in enumerate(dict.fromkeys(GROUPS[row] for row in rows))}
    index = np.array([numbers[GROUPS[row]] for row in rows], dtype=np.int64)
    places, largest = positions_in_groups(index)
    reports: list[Report] = [{} for _ in shares]

    def on_rank(rank: int, reduce: Callable[[Tensor], Tensor]) -> TensorDict:
        mine = slice(rank, None, num_ranks)
        here = torch.from_numpy(index[mine].copy())
        place = torch.from_numpy(places[mine].copy())
        return compute_advantages(
            select_rows(batch, torch.tensor(shares[rank], dtype=torch.int64)),
            estimator=name,
            cfg=cfg,
            groups=RowGroups(here, len(numbers), reduce, place, largest),
            reduce=reduce,
            report=reports[rank].update,
        )

    made = run_ranks(on_rank, num_ranks)
    return _in_order(made, rows, shares), merge(reports)


def _in_order(made: list[TensorDict], rows: list[int], shares: list[list[int]]) -> TensorDict:
    columns = {}
    for name in map(str, made[0].keys()):
        by_row: dict[int, Tensor] = {}
        for part, share in zip(made, shares, strict=True):
            by_row |= dict(zip(share, rows_of(part[name]), strict=True))
        parts = [by_row[row] for row in rows]
        columns[name] = ragged(torch.cat(parts), torch.tensor([len(part) for part in parts]))
    return TensorDict(columns, batch_size=[len(rows)])


def values_of(made: TensorDict, name: str, rows: list[int]) -> Tensor:
    every = rows_of(made[name])
    return torch.cat([every[row] for row in rows])


@pytest.mark.parametrize(("whiten", "num_ranks"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_those_of_the_batch_without_the_failed_rows(
    name: str, whiten: bool, num_ranks: int
) -> None:
    batch = batch_of_all()
    cfg = AdvantageConfig(whiten=whiten, gamma=0.95, kl_coef=0.1)
    compares = registry.ESTIMATORS.find(name).groups
    kept = [row for row in LEFT if not (compares and row == ALONE)]

    found, said = estimated(with_failed(batch), name, list(range(len(GROUPS))), num_ranks, cfg)

    expected, _ = estimated(batch, name, kept, 1, cfg)
    _, said_without = estimated(batch, name, LEFT, 1, cfg)
    for column in ("advantages", "returns"):
        mine = values_of(found, column, kept)
        theirs = expected[column].values()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        assert whiten or num_ranks > 1 or torch.equal(mine, theirs), "the same bits"
        assert (values_of(found, column, FAILED) == 0).all()
        assert not compares or (values_of(found, column, [ALONE]) == 0).all()
    assert said == pytest.approx(said_without, rel=1e-12)


def test_the_table_of_estimators_is_whole() -> None:
    compared = {name for name in ESTIMATORS if registry.ESTIMATORS.find(name).groups}

    alike = {"grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k", "reinforce_pp_baseline"}
    assert compared == alike | {"pass_at_k_std", "optimal_token_baseline"}
    assert set(ESTIMATORS) - compared == {"gae", "remax", "reinforce_pp"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_column_that_says_all_rows_are_valid_changes_no_bit(name: str) -> None:
    batch = batch_of_all()
    rows = list(range(len(GROUPS)))
    marked = batch.clone()
    marked["valid"] = torch.ones(len(GROUPS), dtype=torch.bool)

    plain = estimated(batch, name, rows, 1)
    found = estimated(marked, name, rows, 1)

    assert torch.equal(plain[0]["advantages"].values(), found[0]["advantages"].values())
    assert plain[1] == found[1]


def test_samples_of_a_prompt_whose_greedy_response_failed_have_no_remax_advantage() -> None:
    batch = batch_of_all()
    batch["valid"] = torch.ones(len(GROUPS), dtype=torch.bool)
    damaged = batch.clone()
    lost = [row for row, group in enumerate(GROUPS) if group == 1]
    damaged["baseline_scores"][lost] = torch.nan
    rest = [row for row in range(len(GROUPS)) if row not in lost]

    for whiten in (False, True):
        cfg = AdvantageConfig(whiten=whiten)
        found, _ = estimated(damaged, "remax", list(range(len(GROUPS))), 1, cfg)

        expected, _ = estimated(batch, "remax", rest, 1, cfg)
        mine = values_of(found, "advantages", rest)
        torch.testing.assert_close(mine, expected["advantages"].values(), rtol=0, atol=1e-6)
        assert (values_of(found, "advantages", lost) == 0).all()


def test_an_own_estimator_that_sums_over_groups_has_only_valid_rows_in_them() -> None:
    @registry.advantage("own_best_of_group", groups=True)
    def own(samples: registry.Samples, cfg: AdvantageConfig) -> tuple[Tensor, Tensor]:
        sizes = samples.groups.sizes()
        return samples.spread(samples.scores - samples.groups.sums(samples.scores)), samples.spread(
            sizes
        )

    batch = batch_of_all()
    kept = [row for row in LEFT if row != ALONE]

    found, _ = estimated(with_failed(batch), "own_best_of_group", list(range(len(GROUPS))), 1)

    expected, _ = estimated(batch, "own_best_of_group", kept, 1)
    for column in ("advantages", "returns"):
        assert torch.equal(values_of(found, column, kept), expected[column].values())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        *((name, "token-mean") for name in ESTIMATORS),
        *(("grpo", each) for each in AGGREGATIONS if each != "token-mean"),
    ],
)
def test_gradient_of_the_policy_is_that_of_the_batch_without_the_failed_rows(
    name: str, aggregation: str, num_ranks: int
) -> None:
    batch = batch_of_all()
    loss = PolicyLoss(
        SurrogateLossConfig(entropy_coef=0.1, kl_coef=0.2, aggregation=aggregation), 0.9, budget=8
    )
    everything = list(range(len(GROUPS)))
    damaged = with_failed(batch)
    made, _ = estimated(damaged, name, everything, num_ranks)
    damaged["advantages"] = made["advantages"]
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))

    found = step(loss, dealt(damaged, everything, num_ranks), table, 2, by_tokens=False)

    alone = torch.tensor(LEFT)  # the row that is left alone is learnt with advantage 0
    reference = select_rows(batch, alone)
    reference["advantages"] = select_rows(made, alone)["advantages"]
    expected = step(loss, [reference], table, 1, by_tokens=False)
    assert found[0] == pytest.approx(expected[0], abs=1e-6, rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)
    assert found[2] == pytest.approx(expected[2], abs=1e-4, rel=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradient_of_the_critic_is_that_of_the_batch_without_the_failed_rows(
    num_ranks: int,
) -> None:
    batch = batch_of_all()
    everything = list(range(len(GROUPS)))
    damaged = with_failed(batch)
    made, _ = estimated(damaged, "gae", everything, num_ranks)
    damaged["returns"] = made["returns"]
    table = torch.randn(VOCAB, 1, generator=torch.Generator().manual_seed(1))
    loss = ValueLoss(ValueLossConfig())

    found = step(loss, dealt(damaged, everything, num_ranks), table, 2, by_tokens=False)

    reference = select_rows(batch, torch.tensor(LEFT))
    reference["returns"] = estimated(batch, "gae", LEFT, 1)[0]["returns"]
    expected = step(loss, [reference], table, 1, by_tokens=False)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-6)
    assert found[2] == pytest.approx(expected[2], abs=1e-5)


def dealt(batch: TensorDict, rows: list[int], num_ranks: int) -> list[TensorDict]:
    """What the ranks of an update get, without the failed rows' tokens."""
    shares = [torch.tensor(rows[rank::num_ranks]) for rank in range(num_ranks)]
    return [without_failed(select_rows(batch, share)) for share in shares]


def test_safe_advantages_weights_and_kl_leave_failed_rows_out_of_every_number() -> None:
    batch = batch_of_all()
    damaged = with_failed(batch_of_all())
    damaged["cost_valid"] = damaged["valid"]
    damaged["valid"] = torch.ones_like(damaged["valid"])
    left = select_rows(batch, torch.tensor(LEFT))
    reports: list[Report] = []
    cfg = AdvantageConfig(whiten=True, kl_coef=0.1)

    def run(rows: TensorDict) -> dict[str, Tensor]:
        said: Report = {}
        common = {"reduce": lambda x: x.double(), "report": said.update}
        made = compute_safe_advantages(rows, multiplier=0.5, cfg=cfg, **common)
        made["weights"] = compute_rollout_weights(rows, cfg=CorrectionConfig(), **common)[
            "rollout_weights"
        ]
        measure_kl(rows, **common)
        add_overlong_penalty(rows, cfg=OverlongConfig(), max_tokens=5, **common)
        reports.append(merge([said]))
        return made

    found = run(damaged)
    expected = run(left)

    assert reports[0] == pytest.approx(reports[1], rel=1e-9)
    assert {"reward/overlong", "advantage/measured_kl", "rollout/weight_ess"} <= set(reports[0])
    for name in ("advantages", "returns", "cost_returns", "weights"):
        mine = values_of(found, name, LEFT)
        torch.testing.assert_close(mine, expected[name].values(), rtol=0, atol=1e-6)
        assert (values_of(found, name, FAILED) == 0).all()
