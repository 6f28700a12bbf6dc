"""Row ids: training's run on, held-out ones depend on the row and the sample alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.data.row_id import RowIds, held_out_ids, is_held_out
from spmdflow.errors import ConfigError

NUMBERS = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=20, unique=True)


@given(rows=NUMBERS, few=st.integers(1, 8), more=st.integers(0, 8))
def test_more_samples_or_other_rows_change_no_id_of_a_held_out_row(
    rows: list[int], few: int, more: int
) -> None:
    ids, parents = held_out_ids(np.array(rows), few + more)
    first, _ = held_out_ids(np.array(rows), few)
    alone, _ = held_out_ids(np.array(rows[-1:]), few)

    assert len(set(ids.tolist())) == len(ids) == len(parents)
    assert all(is_held_out(row_id) for row_id in ids.tolist())
    np.testing.assert_array_equal(ids.reshape(-1, few + more)[:, :few].reshape(-1), first)
    np.testing.assert_array_equal(first[-few:], alone)
    groups = np.unique(parents, return_inverse=True)[1].reshape(-1, few + more)
    assert (groups == groups[:, :1]).all() and len(np.unique(groups)) == len(rows)


@given(sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=8))
def test_ids_of_training_are_never_used_twice(sizes: list[tuple[int, int]]) -> None:
    row_ids = RowIds()

    drawn = [row_ids.take_groups(count, size) for count, size in sizes]

    ids = np.concatenate([ids for ids, _ in drawn] + [np.zeros(0, dtype=np.int64)]).tolist()
    groups = {group for _, parents in drawn for group in parents.tolist()}
    assert len(set(ids) | groups) == len(ids) + len(groups)
    assert not any(is_held_out(row_id) for row_id in ids)
    assert all(row_id < row_ids.next_id for row_id in ids)


def test_as_many_samples_as_would_reach_into_the_next_row_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 1048577 samples .*, expected at most 1048576; ask"):
        held_out_ids(np.array([0]), (1 << 20) + 1)
