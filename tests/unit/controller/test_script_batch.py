"""What a script does with rows: rename, rows that go on alone, ragged maths, metrics of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from spmdflow import (
    Batch,
    WorkerGroup,
    concatenate,
    map_function,
    ragged,
    ragged_from_rows,
    rows_of,
)
from spmdflow.errors import ColumnError, RowError, SpmdflowError
from tests.unit.toy_flow import ROWS, Rank, numbers, share


@map_function(reads=("number",), writes=("is_even", "lengthy"))
def look(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """is_even (B,) bool; lengthy: one more row of items than the number."""
    report({"look/largest": float(batch["number"].max())})
    rows = [torch.ones(int(number) + 1) for number in batch["number"].tolist()]
    made = TensorDict({"is_even": batch["number"] % 2 == 0}, batch_size=batch.batch_size)
    made["lengthy"] = ragged_from_rows(rows)
    return made


@map_function(reads=("prompts",), writes=("prompts",))
def add_a_token(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """prompts with the token 7 at their end."""
    rows = [torch.cat([row, torch.tensor([7])]) for row in rows_of(batch["prompts"])]
    return TensorDict({"prompts": ragged_from_rows(rows)}, batch_size=batch.batch_size)


@map_function(reads=("one", "other", "mask"), writes=("sum", "product", "chosen", "masked"))
def combine(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """Ragged columns of equal lengths, as if they were dense."""
    one = batch["one"]
    other = batch["other"]
    mask = batch["mask"]
    made = TensorDict({"sum": one + other, "product": one * other}, batch_size=batch.batch_size)
    made["chosen"] = torch.where(mask, one, -other)
    made["masked"] = one.masked_fill(mask, 0)
    return made


@map_function(reads=("number",), writes=("one", "other", "mask"))
def make_ragged(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """Three ragged columns of equal lengths, each with lengths of its own making."""
    lengths = batch["number"].long() % 3
    total = int(lengths.sum())
    values = torch.arange(float(total))
    made = TensorDict({"one": ragged(values, lengths)}, batch_size=batch.batch_size)
    made["other"] = ragged(values + 10, lengths.clone())
    made["mask"] = ragged(values % 2 == 0, lengths.clone())
    return made


@map_function(reads=("ragged", "lengthy"), writes=("sum",))
def add_unequal(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """Cannot work."""
    return TensorDict({"sum": batch["ragged"] + batch["lengthy"]}, batch_size=batch.batch_size)


# Names


def test_renamed_column_is_read_fetched_and_joined_under_its_new_name(
    batch: Batch, toy: WorkerGroup
) -> None:
    twice = toy.add(batch, what=2.0).rename(number="next")
    whole = batch.rename(old="number") | twice

    assert numbers(whole, "number") == [i + 2 for i in batch.ids]
    assert numbers(toy.add(whole), "next") == [i + 3 for i in batch.ids]
    assert numbers(whole.rename(number="old", old="number"), "number") == batch.ids.tolist()
    assert whole.rename(items="ragged").lengths("items").tolist() == [0, 1, 2, 0, 1, 2]


def test_rename_sends_nothing(rank: Rank, batch: Batch) -> None:
    before = len(rank.flow.caller.records)

    batch.rename(count="number", prompt="prompt_text")

    assert len(rank.flow.caller.records) == before


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"text": "number"}, "rename: got the new name 'text', which the batch has already"),
        ({"new": "nothing"}, "no column 'nothing'; the batch has"),
    ],
)
def test_rename_to_a_taken_or_of_a_missing_name_is_refused(
    batch: Batch, names: dict[str, str], told: str
) -> None:
    with pytest.raises(ColumnError, match=told):
        batch.rename(**names)


# Rows that go on alone


def test_unfinished_rows_go_on_and_come_back_in_their_order(batch: Batch, toy: WorkerGroup) -> None:
    batch |= batch.map(look).drop("lengthy")

    going = batch.where("is_even")
    done = batch.without(going).rename(result="number")
    again = going.drop("number") | toy.add(going, what=100.0).rename(result="next")
    whole = concatenate([done, again]).ordered_like(batch)

    assert going.ids.tolist() == [6, 8, 10]
    assert whole.ids.tolist() == batch.ids.tolist()
    assert numbers(whole, "result") == [106, 7, 108, 9, 110, 11]
    assert numbers(toy.add(whole.rename(number="result")), "next") == [107, 8, 109, 10, 111, 12]


def test_rows_of_a_file_and_rows_that_a_call_made_are_one_column(
    batch: Batch, toy: WorkerGroup
) -> None:
    longer = batch[:2].drop("prompts") | batch[:2].map(add_a_token)
    whole = concatenate([longer, batch[2:]])

    lengths = batch.lengths("prompts") + [1, 1, 0, 0, 0, 0]
    assert whole.lengths("prompts").tolist() == lengths.tolist()
    rows = rows_of(whole.fetch("prompts")["prompts"])
    assert [row[-1].item() == 7 for row in rows[:2]] == [True, True]
    assert numbers(whole, "prompt_text") == numbers(batch, "prompt_text")
    assert numbers(toy.make(whole)) == batch.ids.tolist()


def test_where_takes_bools_and_counts_what_it_fetches(rank: Rank, batch: Batch) -> None:
    batch |= batch.map(look).drop("lengthy")
    before = rank.flow.caller.fetched_bytes.get("filter", 0)

    assert batch.where([True, False] * 3).ids.tolist() == [6, 8, 10]
    assert batch.where(torch.arange(ROWS) > 3).ids.tolist() == [10, 11]
    assert batch.where("is_even").ids.tolist() == [6, 8, 10]
    assert rank.flow.caller.fetched_bytes["filter"] == before + ROWS


NO_NUMBERS: dict[str, tuple[Callable[[Batch], Any], type[SpmdflowError], str]] = {
    "text": (
        lambda b: b.mean("text"),
        ColumnError,
        r"mean\('text'\): got a column of text",
    ),
    "ragged": (lambda b: b.mean("ragged"), ColumnError, "got a column of rows of several lengths"),
    "where": (lambda b: b.where("ragged"), ColumnError, r"where.* rows of several lengths"),
    "mask": (lambda b: b.where([True]), RowError, r"where: got bool of shape \(1,\), expected the"),
    "places": (lambda b: b.where([0, 1, 2, 3, 4, 5]), RowError, "use select for positions"),
    "without": (lambda b: b[:2].without(b[1:3]), RowError, "without: got 1 of 2 rows that are not"),
    "order": (lambda b: b[:2].ordered_like(b), RowError, "batches of 6 and 2 rows share 2 row ids"),
    "none": (lambda b: concatenate([]), RowError, "expected a list of at least one Batch"),
}


@pytest.mark.parametrize("case", NO_NUMBERS)
def test_columns_and_rows_that_cannot_be_used_so_are_refused(batch: Batch, case: str) -> None:
    use, error, told = NO_NUMBERS[case]

    with pytest.raises(error, match=told):
        use(batch)


# Ragged columns


def test_ragged_columns_of_equal_lengths_add_multiply_and_mask(batch: Batch) -> None:
    made = batch.map(make_ragged)
    found = made.map(combine).fetch()

    one = torch.arange(6.0)
    expected = {
        "sum": one + one + 10,
        "product": one * (one + 10),
        "chosen": torch.where(one % 2 == 0, one, -one - 10),
        "masked": one * (one % 2),
    }
    for name, values in expected.items():
        assert torch.equal(found[name].values(), values), name
        assert [len(row) for row in rows_of(found[name])] == [0, 1, 2, 0, 1, 2]


def test_ragged_columns_of_unequal_lengths_are_refused_with_the_way_out(batch: Batch) -> None:
    batch |= batch.map(look)

    with pytest.raises(ColumnError, match=r"^map.add_unequal: .*rows have different lengths.*pad"):
        batch.map(add_unequal)


# Metrics


def test_metrics_of_calls_that_write_columns_are_read_from_the_batch(batch: Batch) -> None:
    made = batch.map(look)
    both = batch | made | batch.map(share)

    assert dict(made.metrics) == {"look/largest": 11.0}
    assert both.metrics["toy/total"] == 51.0
    assert both.metrics["look/largest"] == 11.0
    assert dict(batch.metrics) == {}
