"""Map functions over the samples of a prompt: which rows are a group, and what a call must have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.row_id import RowGroups
from spmdflow.errors import ColumnError, ConfigError, ProtocolError
from spmdflow.objectives.advantage import compute_advantages
from spmdflow.worker_api.register import map_function
from tests.unit.threaded_ranks import run_ranks
from tests.unit.toy_flow import Rank, Toy, ToyConfig, rank_of_one


@map_function(reads=("number",), writes=("group", "total"), groups=True)
def group_totals(
    batch: TensorDict, *, groups: RowGroups, reduce: Any, report: Any, scale: float = 1.0
) -> TensorDict:
    """The number of each row's group, and the sum of number over the group."""
    columns = {"group": groups.index, "total": scale * groups.sums(batch["number"])}
    return TensorDict(columns, batch_size=batch.batch_size)


@map_function(reads=("number",), writes=("members",), groups=True)
def group_members(batch: TensorDict, *, groups: RowGroups, reduce: Any, report: Any) -> TensorDict:
    """The numbers of each row's group, then -1."""
    members = groups.members(batch["number"]).nan_to_num(-1.0)
    return TensorDict({"members": members}, batch_size=batch.batch_size)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of_one(tmp_path / "run", samples_per_prompt=3) as made:
        yield made


def numbers(rank: Rank) -> Any:
    """Six prompts with three samples each; number is the row's id."""
    toy = rank.flow.spawn(Toy, ToyConfig())
    prompts = rank.flow.prompts(rank.config.data)
    return toy.make(next(prompts))


def test_samples_of_a_prompt_are_a_group(rank: Rank) -> None:
    batch = numbers(rank)

    found = batch.map(group_totals, scale=2.0).fetch("group", "total")

    ids = torch.from_numpy(batch.ids).double()
    assert found["group"].tolist() == [g for g in range(6) for _ in range(3)]
    expected = 2 * ids.view(6, 3).sum(-1).repeat_interleave(3)
    torch.testing.assert_close(found["total"], expected)


def test_selected_rows_keep_their_groups_and_only_they_are_summed(rank: Rank) -> None:
    batch = numbers(rank).select([4, 0, 5, 17, 2])

    found = batch.map(group_totals).fetch("group", "total")

    a, b, c, d, e = torch.from_numpy(batch.ids).double().tolist()
    assert found["group"].tolist() == [1, 0, 1, 2, 0]
    assert found["total"].tolist() == [a + c, b + e, a + c, d, b + e]


def test_every_row_sees_the_numbers_of_its_whole_group(rank: Rank) -> None:
    batch = numbers(rank).select([4, 0, 5, 17, 2])

    found = batch.map(group_members).fetch("members")["members"]

    a, b, c, d, e = torch.from_numpy(batch.ids).double().tolist()
    alone = [d, -1.0]
    assert found.tolist() == [[a, c], [b, e], [a, c], alone, [b, e]]  # type: ignore[union-attr]


def test_repeated_rows_are_groups_of_their_original(rank: Rank) -> None:
    batch = numbers(rank).select([3, 7]).repeat(2)

    assert batch.map(group_totals).fetch("group")["group"].tolist() == [0, 0, 1, 1]


def test_argument_of_the_same_name_as_what_the_executor_gives_is_refused(rank: Rank) -> None:
    batch = numbers(rank)

    with pytest.raises(ProtocolError, match="unexpected keyword argument 'size'"):
        batch.map(group_totals, size=1)


def test_columns_that_an_estimator_reads_are_asked_for_before_anything_is_sent(rank: Rank) -> None:
    batch = numbers(rank)
    cfg = AdvantageConfig()

    with pytest.raises(ColumnError, match="expected .*'values'.* too"):
        batch.map(compute_advantages, estimator="gae", cfg=cfg)
    with pytest.raises(ColumnError, match="expected .*'baseline_scores'.* too"):
        batch.map(compute_advantages, estimator="remax", cfg=cfg)
    with pytest.raises(ConfigError, match="got 'gea', expected one of"):
        batch.map(compute_advantages, estimator="gea", cfg=cfg)
    with pytest.raises(ProtocolError, match="missing a required .*argument: 'estimator'"):
        batch.map(compute_advantages, cfg=cfg)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12))
def test_group_sums_are_the_same_wherever_rows_lie(rows: list[tuple[int, int]]) -> None:
    values = torch.arange(len(rows), dtype=torch.float64) ** 2

    def on_rank(rank: int, reduce: Any) -> dict[int, float]:
        mine = [i for i, (_, owner) in enumerate(rows) if owner == rank]
        index = torch.tensor([rows[i][0] for i in mine], dtype=torch.int64)
        groups = RowGroups(index, 4, reduce)
        return dict(zip(mine, groups.means(values[mine]).tolist(), strict=True))

    found = {row: mean for part in run_ranks(on_rank, 3) for row, mean in part.items()}

    for i, (group, _) in enumerate(rows):
        members = [float(values[j]) for j, (other, _) in enumerate(rows) if other == group]
        assert found[i] == pytest.approx(sum(members) / len(members))
