"""Distinct-n of responses, against sets of tuples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.data.ragged import ragged_from_rows
from spmdflow.rewards.distinct import distinct_share

ROWS = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=6)


def ragged(rows: list[list[int]]) -> torch.Tensor:
    return ragged_from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])


def test_repeated_pair_counts_once() -> None:
    assert distinct_share(ragged([[5, 6, 5, 6]])) == (pytest.approx(2 / 3), 1)


def test_rows_without_a_pair_do_not_count() -> None:
    assert distinct_share(ragged([[5], [], [7, 7, 7]])) == (pytest.approx(1 / 2), 1)
    assert distinct_share(ragged([[1], [2]])) == (0.0, 0)


@given(rows=ROWS, n=st.integers(1, 3))
def test_shares_are_those_of_sets(rows: list[list[int]], n: int) -> None:
    shares = []
    for row in rows:
        grams = [tuple(row[start : start + n]) for start in range(len(row) - n + 1)]
        if grams:
            shares.append(len(set(grams)) / len(grams))

    total, count = distinct_share(ragged(rows), n)

    assert count == len(shares)
    assert total == pytest.approx(sum(shares))
