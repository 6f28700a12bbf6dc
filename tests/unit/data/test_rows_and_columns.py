"""Ragged, dense and text columns: cutting, joining, storing. Reference: plain Python lists."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from spmdflow.data.column import Column, ColumnSpec, column_of, join
from spmdflow.data.ragged import (
    lengths_of,
    pad,
    ragged_from_padded,
    ragged_from_rows,
    rows_of,
    select_rows,
)
from spmdflow.data.store import RowCondition, RowStore
from spmdflow.errors import ColumnError, RowError, RunFailed

rows_of_ints = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=8)


def jagged(rows):
    return ragged_from_rows(
        [torch.tensor(row, dtype=torch.int64) for row in rows], dtype=torch.int64
    )


def as_lists(value):
    return [row.tolist() for row in rows_of(value)]


@given(rows_of_ints)
def test_padding_and_cutting_back_gives_the_same_rows(rows):
    value = jagged(rows)

    again = ragged_from_padded(pad(value), lengths_of(value))

    assert as_lists(again) == rows


@given(rows_of_ints, st.data())
def test_rows_taken_in_any_order_equal_a_list_index(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    column = column_of("x", jagged(rows), len(rows))

    taken = column.take(torch.tensor(index, dtype=torch.int64))

    assert as_lists(taken.to_value()) == [rows[i] for i in index]


def test_consecutive_rows_are_taken_without_a_copy():
    column = Column("dense", torch.arange(10.0))

    assert column.take(torch.arange(2, 6)).values.data_ptr() == column.values[2:].data_ptr()


@given(st.lists(st.text(max_size=6), max_size=6), st.data())
def test_text_survives_storage_and_any_order(texts, data):
    index = data.draw(st.permutations(range(len(texts))))
    column = column_of("t", texts, len(texts))

    assert column.take(torch.tensor(index, dtype=torch.int64)).to_value() == [
        texts[i] for i in index
    ]


def test_spec_counts_the_bytes_of_an_item():
    assert ColumnSpec("dense", "float32", (3, 2)).item_bytes == 24
    assert column_of("m", jagged([[1], [2, 3]]), 2).spec == ColumnSpec("ragged", "int64", ())


def test_a_column_with_a_wrong_row_count_is_refused_with_both_numbers():
    with pytest.raises(ColumnError, match="got 3 rows, expected 2"):
        column_of("x", torch.zeros(3), 2)


def test_a_column_of_python_objects_is_refused():
    with pytest.raises(ColumnError, match="got dict, expected a tensor"):
        column_of("x", {}, 0)


def test_joined_columns_hold_the_rows_one_after_the_other():
    parts = [column_of("x", jagged(rows), len(rows)) for rows in ([[1, 2]], [], [[3], []])]

    assert as_lists(join(parts).to_value()) == [[1, 2], [3], []]


def test_select_rows_cuts_every_kind_of_column_alike():
    batch = TensorDict({"d": torch.arange(3), "r": jagged([[1], [], [2, 3]])}, batch_size=[3])
    batch.set_non_tensor("t", ["a", "b", "c"])

    chosen = select_rows(batch, torch.tensor([2, 0]))

    assert chosen["d"].tolist() == [2, 0]
    assert as_lists(chosen["r"]) == [[2, 3], [1]]
    assert list(chosen["t"]) == ["c", "a"]


def test_select_rows_of_nothing_keeps_every_column():
    batch = TensorDict({"d": torch.arange(3), "r": jagged([[1], [], [2, 3]])}, batch_size=[3])
    batch.set_non_tensor("t", ["a", "b", "c"])

    chosen = select_rows(batch, torch.zeros(0, dtype=torch.int64))

    assert chosen.batch_size == torch.Size([0])
    assert set(chosen.keys()) == {"d", "r", "t"}


def dense(*values):
    return {"x": Column("dense", torch.tensor(values))}


def test_rows_that_arrived_in_parts_are_taken_in_the_order_asked_for():
    store = RowStore()
    store.put(1, np.array([5, 3]), dense(50, 30))
    store.put(1, np.array([4]), dense(40))

    taken = store.take(1, ["x"], np.array([3, 4, 5]))

    assert taken["x"].values.tolist() == [30, 40, 50]


def test_rows_that_are_not_there_are_named():
    store = RowStore()
    store.put(1, np.array([5]), dense(50))

    with pytest.raises(RowError, match=r"1 of 2 rows are not here \(first id \[6\]\)"):
        store.take(1, ["x"], np.array([5, 6]))


def test_waiting_ends_when_the_other_lane_puts_the_rows():
    store = RowStore()
    late = threading.Timer(0.05, lambda: store.put(1, np.array([5]), dense(50)))
    late.start()

    store.wait(1, ["x"], np.array([5]))

    assert store.take(1, ["x"], np.array([5]))["x"].values.tolist() == [50]


def test_waiting_for_rows_that_never_come_ends_with_the_session():
    arrival = RowCondition()
    threading.Timer(0.05, arrival.end, args=[RunFailed("over")]).start()

    with pytest.raises(RunFailed, match="over"):
        RowStore(arrival).wait(1, ["x"], np.array([5]))


def test_freed_frames_are_gone_and_unknown_ones_are_ignored():
    store = RowStore()
    store.put(1, np.array([5]), dense(50))

    store.free([1, 99])

    assert store.num_results() == 0
