"""Batches in a script: rows by id, columns by name, values only when they are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spmdflow.controller.batch import Batch
from spmdflow.controller.group import WorkerGroup
from spmdflow.data.ragged import rows_of
from spmdflow.errors import ColumnError, ProtocolError, RowError
from tests.unit.toy_flow import ROWS, Rank, count_tokens, numbers, share, unmarked_maths

# Joins


def test_join_matches_rows_by_id_and_keeps_the_order_of_the_left_side(
    batch: Batch, toy: WorkerGroup
) -> None:
    turned = batch.select([5, 3, 1, 0, 2, 4])

    left = turned | toy.add(batch)
    right = toy.add(batch) | turned

    assert left.ids.tolist() == turned.ids.tolist()
    assert right.ids.tolist() == batch.ids.tolist()
    for joined in (left, right):
        assert numbers(joined) == joined.ids.tolist()
        assert numbers(joined, "next") == [i + 1 for i in joined.ids]
        assert numbers(joined, "text") == [f"row {i}" for i in joined.ids]


def test_join_of_other_rows_is_refused_with_both_numbers(batch: Batch, toy: WorkerGroup) -> None:
    with pytest.raises(RowError) as caught:
        batch | toy.add(batch[1:5])

    assert str(caught.value) == (
        "batches of 6 and 4 rows share 4 row ids, expected the same ids; "
        "join batches that come from one batch of prompts"
    )


def test_join_of_as_many_but_different_rows_is_refused(batch: Batch, toy: WorkerGroup) -> None:
    with pytest.raises(RowError, match="batches of 4 and 4 rows share 3 row ids"):
        batch[:4] | toy.add(batch[1:5])


def test_join_with_a_column_of_two_sources_is_refused_with_both(
    batch: Batch, toy: WorkerGroup
) -> None:
    with pytest.raises(ColumnError) as caught:
        batch | toy.add(batch) | toy.add(batch, what=2)

    assert str(caught.value) == (
        "column 'next': in both batches (from toy.add and toy.add), expected in one; "
        "drop it from one of them"
    )


def test_join_with_a_column_of_one_source_is_none_twice(batch: Batch, toy: WorkerGroup) -> None:
    assert (batch | toy.extend(batch)).columns == (*batch.columns, "twin")


def test_join_with_metrics_is_refused(batch: Batch, toy: WorkerGroup) -> None:
    with pytest.raises(ProtocolError, match=r"^batch \| Result: expected a Batch on both sides;"):
        batch | toy.measure(batch)  # type: ignore[operator]


# Rows


def test_repeat_makes_new_ids_with_parents_and_keeps_the_values(
    batch: Batch, toy: WorkerGroup
) -> None:
    three = batch.repeat(3)

    assert len(three) == 3 * ROWS
    assert len(set(three.ids.tolist()) | set(batch.ids.tolist())) == 4 * ROWS
    assert three.parents.tolist() == np.repeat(batch.ids, 3).tolist()
    assert numbers(three) == np.repeat(batch.ids, 3).tolist()
    assert numbers(three | toy.add(three), "next") == [i + 1 for i in three.parents]


@pytest.mark.parametrize("n", [0, -2])
def test_repeat_by_less_than_one_is_refused(batch: Batch, n: int) -> None:
    before = batch.caller.row_ids.next_id

    with pytest.raises(RowError, match=rf"^repeat: got {n}, expected at least 1; use select"):
        batch.repeat(n)

    assert batch.caller.row_ids.next_id == before


def test_select_slices_and_filter_keep_ids_and_values(batch: Batch) -> None:
    ids = batch.ids.tolist()

    odd = batch.filter("number", lambda number: number % 2 == 1)
    named = batch.filter("text", lambda text: text.endswith(str(ids[2])))
    long = batch.filter("ragged", lambda row: len(row) == 2)

    assert batch[1:4].ids.tolist() == ids[1:4] == numbers(batch[1:4])
    assert batch[::-2].ids.tolist() == ids[::-2] == numbers(batch[::-2])
    assert numbers(batch.select([4, -6])) == [ids[4], ids[0]]
    assert odd.ids.tolist() == numbers(odd) == [i for i in ids if i % 2 == 1]
    assert named.ids.tolist() == [ids[2]]
    assert long.ids.tolist() == [i for i in ids if i % 3 == 2]


def test_parts_of_a_batch_are_rows_like_any_other(batch: Batch, toy: WorkerGroup) -> None:
    part = batch.select([4, 1])

    joined = part | toy.add(part)

    assert numbers(joined, "next") == [i + 1 for i in part.ids]
    assert [len(row) for row in rows_of(joined.fetch("ragged")["ragged"])] == [
        i % 3 for i in part.ids
    ]


def test_batch_without_rows_goes_through_every_kind_of_call(batch: Batch, toy: WorkerGroup) -> None:
    none = batch[:0]

    joined = none | toy.add(none)
    joined |= joined.map(share)

    assert {name: len(value) for name, value in joined.fetch().items()} == dict.fromkeys(
        joined.columns, 0
    )
    assert toy.update(none).values_by_rank() == [[]]
    assert len(joined.filter("number", bool)) == len(joined.repeat(3)) == 0


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 6], "select: got positions from 0 to 6, expected 0 to 5; correct the positions"),
        ([-7], "select: got positions from -7 to -7, expected 0 to 5; correct the positions"),
        (
            [1, 1],
            "select: got 2 positions with repeats, expected each row at most once; "
            "use repeat, which makes new row ids",
        ),
        (
            np.array([True, False] * 3),
            "select: got bool of shape (6,), expected a list of positions; use where for a mask",
        ),
    ],
)
def test_positions_that_are_none_are_refused(batch: Batch, positions: Any, message: str) -> None:
    with pytest.raises(RowError) as caught:
        batch.select(positions)

    assert str(caught.value) == message


def test_single_row_by_number_is_refused_with_what_to_write(batch: Batch) -> None:
    with pytest.raises(RowError, match=r"^batch\[2\]: expected a slice.*write batch\[3:4\]"):
        batch[2]  # type: ignore[index]


def test_groups_are_kept_or_left_out_whole(batch: Batch) -> None:
    three = batch[:3].repeat(3)

    kept = three.filter_groups("number", lambda values: values[0] != batch.ids[1])

    assert kept.parents.tolist() == np.repeat(batch.ids[[0, 2]], 3).tolist()
    assert numbers(kept) == kept.parents.tolist()


def test_best_row_of_each_group_is_the_last_of_those_with_the_largest_number(
    batch: Batch, toy: WorkerGroup
) -> None:
    samples = batch[:3].repeat(4).select([11, 0, 5, 2, 7, 1])  # groups of 1, 3 and 2 rows
    numbered = toy.add(samples)

    best = (samples | numbered).best("next")

    expected = {}
    for row, group, number in zip(samples.ids, samples.parents, numbers(numbered, "next")):
        if number >= expected.get(group, (number, row))[0]:
            expected[group] = (number, row)
    assert sorted(best.ids) == sorted(row for _, row in expected.values())
    assert len(best) == 3 and len(batch[:0].best("number")) == 0


# Columns


def test_columns_are_chosen_with_a_prefix_for_their_names(batch: Batch, toy: WorkerGroup) -> None:
    both = batch | toy.add(batch)

    chosen = both.only("number", "next", prefix="other_")

    assert chosen.columns == ("other_number", "other_next")
    assert numbers(chosen, "other_next") == numbers(both, "next")
    assert numbers(both | chosen, "other_number") == numbers(both)


def test_row_of_each_prompt_is_shared_by_its_samples(batch: Batch, toy: WorkerGroup) -> None:
    samples = batch.repeat(3).select([8, 0, 1, 16, 2, 15, 7])
    firsts = samples.first_samples()
    assert firsts.ids.tolist() == samples.ids[[0, 1, 3]].tolist()

    shared = toy.add(firsts.select([2, 0, 1])).shared_by(samples)
    joined = samples | shared

    assert numbers(joined, "next") == [number + 1 for number in numbers(samples)]
    assert joined.ids.tolist() == samples.ids.tolist()
    assert sum(numbers(joined.map(share), "share")) == pytest.approx(1)


@pytest.mark.parametrize("rows", [[0, 1], [0, 3, 5, 1], []])
def test_other_rows_than_one_of_each_prompt_are_not_shared(
    batch: Batch, toy: WorkerGroup, rows: list[int]
) -> None:
    samples = batch[:3].repeat(2)

    with pytest.raises(RowError, match="rows of .* prompts for samples of 3 prompts, expected one"):
        toy.add(samples.select(rows)).shared_by(samples)


def test_drop_leaves_the_others_and_wants_a_column_that_is_there(batch: Batch) -> None:
    left = batch.drop("number", "row")

    assert left.columns == ("prompts", "prompt_text", "text", "ragged")
    assert len(left) == ROWS and "number" in batch.columns
    with pytest.raises(ColumnError, match=r"^no column 'number'; the batch has \['prompt_text', "):
        left.drop("number")


def test_representation_says_rows_and_columns_without_waiting(batch: Batch) -> None:
    shown = "Batch(6 rows: number, prompt_text, prompts, ragged, row, text)"

    assert repr(batch) == shown


def test_lengths_are_known_without_values(batch: Batch, rank: Rank) -> None:
    assert batch.lengths("ragged").tolist() == [i % 3 for i in batch.ids]
    assert batch.lengths("number").tolist() == [1] * ROWS
    assert batch.lengths("prompts").tolist() == [
        len(row) for row in rows_of(batch.fetch("prompts")["prompts"])
    ]
    with pytest.raises(ColumnError, match="its lengths are not known on the controller"):
        batch.lengths("prompt_text")


def test_fetch_counts_the_bytes_of_what_it_brings_and_nothing_else_does(
    batch: Batch, toy: WorkerGroup, rank: Rank
) -> None:
    fetched = rank.flow.caller.fetched_bytes

    joined = batch | toy.add(batch)
    assert fetched == {}
    joined.fetch("next")
    assert fetched == {"script": 4 * ROWS}  # float32
    joined.fetch("ragged", "text")
    items = int(batch.lengths("ragged").sum())
    texts = sum(len(text) for text in numbers(batch, "text"))
    assert fetched == {"script": 4 * ROWS + 8 * items + 2 * texts}
    joined.filter("next", bool)
    assert fetched["filter"] == 4 * ROWS


def test_fetch_without_names_brings_every_column(batch: Batch) -> None:
    values = batch.fetch()

    assert values.keys() == set(batch.columns)
    assert all(len(value) == ROWS for value in values.values())


# Map functions


def test_map_runs_where_the_rows_live_and_sums_over_all_of_them(batch: Batch) -> None:
    joined = batch | batch.map(share, scale=2.0)

    total = float(batch.ids.sum())
    assert numbers(joined, "share") == pytest.approx([2 * i / total for i in batch.ids])


MAPS: dict[str, tuple[tuple[Any, dict[str, Any]], str]] = {
    "a lambda": (
        (lambda batch: batch, {}),
        "map: got MAPS.<lambda>; expected a function that every rank can import by name; "
        "move it to the top level of its module",
    ),
    "no mark": (
        (unmarked_maths, {}),
        "map: unmarked_maths declares no columns; expected a function marked with "
        "@map_function(reads=(...), writes=(...)); add the mark above its definition",
    ),
}


@pytest.mark.parametrize("mistake", MAPS)
def test_function_that_ranks_cannot_run_is_refused(batch: Batch, mistake: str) -> None:
    (function, settings), message = MAPS[mistake]

    with pytest.raises(ProtocolError) as caught:
        batch.map(function, **settings)

    assert str(caught.value) == message.replace("MAPS.<lambda>", function.__qualname__)


def test_map_with_wrong_arguments_is_refused_at_the_call(batch: Batch, rank: Rank) -> None:
    calls = len(rank.flow.caller.records)

    with pytest.raises(ProtocolError, match=r"^map\.share: got an unexpected keyword argument 'x'"):
        batch.map(share, x=1)

    assert len(rank.flow.caller.records) == calls


def test_map_without_its_column_is_refused(batch: Batch) -> None:
    with pytest.raises(ColumnError, match=r"^map\.share: the batch has .* expected \['number'\] "):
        batch.drop("number").map(share)


def test_map_of_data_rows_that_no_call_has_seen_is_refused_as_it_has_no_place_to_run(
    batch: Batch,
) -> None:
    with pytest.raises(ProtocolError) as caught:
        batch.drop("number", "text", "ragged").map(count_tokens)

    assert str(caught.value) == (
        "map.count_tokens: got a batch of ['prompts', 'prompt_text', 'row'], none of which a call "
        "has made, expected at least one column made by a worker; call a worker method on the "
        "batch first"
    )
