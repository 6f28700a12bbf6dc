"""Rows of several batches as one: concatenated, or side by side under the ids of one of them."""

from __future__ import annotations

import numpy as np
import pytest

from spmdflow.controller.batch import Batch, concatenate
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.prompts import PromptStream
from spmdflow.data.ragged import rows_of
from spmdflow.errors import ColumnError, RowError
from tests.unit.toy_flow import ROWS, Rank, draw, numbers, share


def test_parts_join_again_unless_they_overlap(batch: Batch) -> None:
    whole = concatenate([batch[4:], batch[:4]])

    assert numbers(whole) == whole.ids.tolist() == np.roll(batch.ids, 2).tolist()
    with pytest.raises(RowError, match="^concatenate: got 7 rows with 6 row ids, expected each"):
        concatenate([batch[:4], batch[3:]])


def test_rows_of_several_calls_and_draws_become_one_batch(
    prompts: PromptStream, toy: WorkerGroup
) -> None:
    draws = [draw(prompts, toy) for _ in range(3)]
    parts = [draws[0].select([4, 1]), draws[1][:0], draws[1].repeat(2)[3:5], draws[2][::-1]]

    whole = concatenate(parts)

    assert whole.ids.tolist() == [i for part in parts for i in part.ids]
    assert whole.parents.tolist() == [i for part in parts for i in part.parents]
    for name in ("number", "text", "prompt_text", "row"):
        assert numbers(whole, name) == [
            x for part in parts if len(part) for x in numbers(part, name)
        ]
    expected = [row.tolist() for part in parts for row in rows_of(part.fetch("ragged")["ragged"])]
    assert [row.tolist() for row in rows_of(whole.fetch("ragged")["ragged"])] == expected
    for name in ("ragged", "prompts"):
        lengths = np.concatenate([part.lengths(name) for part in parts])
        assert whole.lengths(name).tolist() == lengths.tolist()


def test_joined_rows_are_rows_like_any_other_and_free_what_they_were_made_of(
    rank: Rank, prompts: PromptStream, toy: WorkerGroup
) -> None:
    whole = concatenate([draw(prompts, toy) for _ in range(2)])

    whole |= toy.add(whole)
    whole |= whole.map(share)
    again = concatenate([whole[8:], whole[:8]])

    assert numbers(again, "next") == [i + 1 for i in numbers(again)]
    assert sum(numbers(again, "share")) == pytest.approx(1)
    assert rank.num_results == 3  # joined rows, next and share: what they were made of is freed


def test_batches_with_different_columns_are_refused_by_name(batch: Batch, toy: WorkerGroup) -> None:
    with pytest.raises(ColumnError) as caught:
        concatenate([batch[:2] | toy.add(batch[:2]), batch[2:].drop("text")])

    assert str(caught.value) == (
        "concatenate: got ['next', 'text'] in only one of batch 0 and batch 1, expected the same "
        "columns in every batch; drop them, or call what writes them on the other"
    )


def test_rows_of_another_batch_join_by_place_under_its_ids(
    prompts: PromptStream, toy: WorkerGroup
) -> None:
    batch = draw(prompts, toy)
    others = draw(prompts, toy)

    joined = batch | toy.add(others[::-1]).aligned_with(batch)

    assert joined.ids.tolist() == batch.ids.tolist()
    assert joined.parents.tolist() == batch.parents.tolist()
    assert numbers(joined) == batch.ids.tolist()
    assert numbers(joined, "next") == [i + 1 for i in others.ids[::-1]]
    assert numbers(toy.add(joined.drop("next")), "next") == [i + 1 for i in batch.ids]


def test_rows_of_a_shorter_batch_do_not_align(batch: Batch) -> None:
    with pytest.raises(RowError) as caught:
        batch[:2].aligned_with(batch)

    assert str(caught.value) == (
        f"aligned_with: got 2 rows for a batch of {ROWS}, expected as many; draw as many rows, or "
        f"select"
    )


def test_mean_of_a_column_is_fetched_but_not_by_the_script(batch: Batch, rank: Rank) -> None:
    assert batch.mean("number") == pytest.approx(np.mean(batch.ids))
    assert batch[:0].mean("number") == 0
    assert rank.flow.caller.fetched_bytes == {"filter": 4 * ROWS}
