"""Medians, quartiles and percentiles, against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.throughput.distribution import Lengths, Quartiles, quantile


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantile_of_any_numbers_is_that_of_numpy(numbers: list[float], share: float) -> None:
    assert quantile(sorted(numbers), share) == pytest.approx(
        float(np.quantile(numbers, share)), rel=1e-9, abs=1e-9
    )


def test_spread_of_five_numbers_is_that_of_a_hand_computation() -> None:
    spread = Quartiles.of([4.0, 1.0, 2.0, 10.0, 3.0])

    assert spread == Quartiles(5, 4.0, 3.0, 2.0, 4.0, 1.0, 10.0)
    assert Quartiles.of([]) is None


def test_percentiles_of_lengths_are_the_least_lengths_that_so_many_rows_do_not_exceed() -> None:
    """200 rows of 1 to 200 tokens: 99 % are 198 rows."""
    counted = [[length, 1] for length in range(1, 201)]

    assert Lengths.of(counted) == Lengths(200, 100.5, p50=100, p90=180, p99=198, most=200)


def test_one_long_row_of_a_hundred_is_above_p99_and_the_maximum() -> None:
    lengths = Lengths.of([[3, 50], [900, 1], [3, 49]])

    assert lengths == Lengths(100, 11.97, p50=3, p90=3, p99=3, most=900)
    assert Lengths.of([]) is None
