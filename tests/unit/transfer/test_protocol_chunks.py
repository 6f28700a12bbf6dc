"""Cutting rows: evenly, with groups whole, balanced by weight."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.errors import RowError
from spmdflow.transfer.chunk import balanced_chunks, chunks, grouped_chunks

parts_of = st.integers(1, 9)


@given(num_rows=st.integers(0, 200), parts=parts_of)
def test_even_chunks_are_those_of_numpy(num_rows, parts):
    expected = [part.tolist() for part in np.array_split(np.arange(num_rows), parts)]

    assert [list(chunk) for chunk in chunks(num_rows, parts)] == expected


@pytest.mark.parametrize(("num_rows", "parts"), [(-1, 2), (5, 0)])
def test_cut_that_cannot_be_made_is_refused_with_both_numbers(num_rows, parts):
    with pytest.raises(RowError, match=f"got {num_rows} rows over {parts} parts"):
        chunks(num_rows, parts)


@given(groups=st.lists(st.integers(0, 12), max_size=60), parts=parts_of)
def test_grouped_chunks_keep_groups_whole_and_in_order(groups, parts):
    shares = grouped_chunks(groups, parts)

    assert len(shares) == parts
    assert sorted(chain(*shares)) == list(range(len(groups)))
    seen = [{groups[row] for row in share} for share in shares]
    assert sum(len(names) for names in seen) == len(set(groups))
    firsts = [sorted(groups.index(name) for name in names) for names in seen]
    assert list(chain(*firsts)) == sorted(chain(*firsts))


@given(num_groups=st.integers(0, 40), size=st.integers(1, 6), parts=parts_of)
def test_grouped_chunks_of_equal_groups_differ_by_at_most_one_group(num_groups, size, parts):
    shares = grouped_chunks([row // size for row in range(num_groups * size)], parts)

    assert {len(share) // size for share in shares} <= {
        num_groups // parts,
        -(-num_groups // parts),
    }


@given(num_rows=st.integers(0, 60), parts=parts_of)
def test_grouped_chunks_of_single_rows_are_the_even_chunks(num_rows, parts):
    assert grouped_chunks(range(num_rows), parts) == [list(c) for c in chunks(num_rows, parts)]


def test_groups_of_4_samples_over_2_parts_are_cut_between_groups():
    assert grouped_chunks([0] * 4 + [1] * 4 + [2] * 4, 2) == [list(range(8)), [8, 9, 10, 11]]


@given(rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=60), parts=parts_of)
def test_balanced_chunks_keep_groups_whole_within_the_bound_of_graham(rows, parts):
    weights, groups = [weight for weight, _ in rows], [group for _, group in rows]

    shares = balanced_chunks(weights, parts, groups)

    assert len(shares) == parts
    assert sorted(chain(*shares)) == list(range(len(rows)))
    assert all(share == sorted(share) for share in shares)
    assert sum(len({groups[row] for row in share}) for share in shares) == len(set(groups))
    heaviest = max((sum(w for w, g in rows if g == name) for name in set(groups)), default=0)
    largest = max(sum(weights[row] for row in share) for share in shares)
    assert largest * parts <= sum(weights) + (parts - 1) * heaviest


@given(weight=st.integers(0, 5), num_rows=st.integers(0, 40), parts=parts_of)
def test_balanced_chunks_of_equal_rows_are_even(weight, num_rows, parts):
    sizes = {len(share) for share in balanced_chunks([weight] * num_rows, parts)}

    assert sizes <= {num_rows // parts, -(-num_rows // parts)}


def test_balanced_chunks_put_one_long_row_against_many_short_ones():
    assert balanced_chunks([5, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]


def test_balanced_chunks_depend_on_the_arguments_alone():
    weights = np.random.default_rng(0).integers(0, 9, 300).tolist()

    assert balanced_chunks(weights, 7) == balanced_chunks(list(weights), 7)
    assert balanced_chunks([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]


def test_weights_and_groups_of_different_length_are_refused_with_both_numbers():
    with pytest.raises(RowError, match="got 2 groups for 3 rows"):
        balanced_chunks([1, 2, 3], 2, [0, 0])


def test_negative_weight_is_refused():
    with pytest.raises(RowError, match="got weight -1, expected none below 0"):
        balanced_chunks([1, -1], 2)
