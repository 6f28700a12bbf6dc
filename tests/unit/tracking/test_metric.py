"""Metrics of ranks and calls become numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.errors import ProtocolError
from spmdflow.tracking.metric import merge
from spmdflow.worker_api.metric import Max, Mean, Metric, Min, Sum

NUMBERS = st.floats(-1e6, 1e6)
WEIGHTS = st.integers(0, 100)


def test_a_mean_is_weighted_over_ranks_and_calls():
    assert merge([{"a": Mean(3.0, 1)}, {"a": Mean(1.0, 3)}]) == {"a": 1.0}


def test_a_sum_adds_and_a_max_takes_the_largest():
    merged = merge([{"n": Sum(2), "m": Max(-3.0)}, {"n": Sum(5), "m": Max(-1.0)}])

    assert merged == {"n": 7.0, "m": -1.0}


def test_plain_numbers_are_averaged():
    assert merge([{"lr": 1.0}, {"lr": 2.0}, {"lr": 6.0}]) == {"lr": 3.0}


def test_equal_plain_numbers_of_three_ranks_stay_the_same_bits():
    assert merge([{"loss": 0.1}] * 3) == {"loss": 0.1}
    assert math.fsum([0.1] * 3) / 3 != 0.1


def test_a_mean_without_weight_is_left_out_so_empty_ranks_do_not_count():
    assert merge([{"a": Mean(0.0, 0)}, {"b": Sum(1)}]) == {"b": 1.0}
    assert merge([{"a": Mean(0.0, 0)}, {"a": Mean(4.0, 2)}]) == {"a": 2.0}


def test_a_nan_of_one_rank_shows_in_every_kind():
    nan = math.nan
    merged = merge(
        [{"a": Mean(nan, 1), "b": Sum(nan), "c": Max(nan), "d": nan}]
        + [{"a": Mean(1, 1), "b": Sum(1), "c": Max(1), "d": 1.0}]
    )

    assert all(math.isnan(merged[name]) for name in "abcd")


def test_infinities_of_both_signs_give_nan_not_an_error():
    assert math.isnan(merge([{"a": Sum(math.inf)}, {"a": Sum(-math.inf)}])["a"])


def test_names_keep_the_order_of_first_occurrence():
    assert list(merge([{"z": 1.0, "a": 1.0}, {"b": 1.0, "z": 1.0}])) == ["z", "a", "b"]


def test_one_name_with_two_kinds_is_refused_with_both_kinds():
    with pytest.raises(ProtocolError, match="'a'.*Mean and Sum.*one kind"):
        merge([{"a": Mean(1, 1)}, {"a": Sum(1)}])


def test_nothing_merges_to_nothing():
    assert merge([]) == {}
    assert merge([{}, {}]) == {}


@given(
    st.lists(st.builds(Mean, NUMBERS, WEIGHTS), min_size=1)
    | st.lists(st.builds(Sum, NUMBERS), min_size=1)
    | st.lists(st.builds(Max, NUMBERS), min_size=1)
    | st.lists(NUMBERS, min_size=1),
    st.randoms(use_true_random=False),
)
def test_the_order_of_replies_changes_no_bit(values, random):
    mappings: list[dict[str, Metric]] = [{"a": value} for value in values]
    merged = merge(mappings)
    random.shuffle(mappings)

    assert merge(mappings) == merged


@given(st.lists(st.tuples(NUMBERS, WEIGHTS), min_size=1))
def test_a_mean_equals_the_mean_over_all_samples(pairs):
    weight = sum(number for _, number in pairs)
    merged = merge([{"a": Mean(value * number, number)} for value, number in pairs])

    if weight:
        expected = sum(value * number for value, number in pairs) / weight
        assert merged["a"] == pytest.approx(expected, rel=1e-9, abs=1e-6)
    else:
        assert merged == {}


def test_smallest_of_all_ranks_is_nan_if_one_is() -> None:
    assert merge([{"x": Min(2.0)}, {"x": Min(-1.5)}, {}]) == {"x": -1.5}
    assert math.isnan(merge([{"x": Min(2.0)}, {"x": Min(math.nan)}])["x"])
    with pytest.raises(ProtocolError, match="Max and Min"):
        merge([{"x": Min(2.0)}, {"x": Max(2.0)}])
