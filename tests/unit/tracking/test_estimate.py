"""pass@k and majority@k against every subset and every tie-break; intervals against theory."""

from __future__ import annotations

import random
from itertools import combinations
from statistics import NormalDist, mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.controller.evaluation import Judged
from spmdflow.tracking.estimate import (
    estimate_metrics,
    estimates,
    majority,
    pass_at_k,
    prompt_accuracies,
    reported_ks,
)


@st.composite
def prompts(draw: st.DrawFn) -> list[list[tuple[str | None, float]]]:
    """(answer, right) of each sample of each prompt; equal answers are equally right."""
    num_samples = draw(st.integers(1, 7))
    answer = st.sampled_from([None, "a", "b", "c", "d"])
    rows = draw(st.lists(st.lists(answer, min_size=num_samples, max_size=num_samples), min_size=1))
    keys = [draw(st.sets(st.sampled_from("abcd"))) for _ in rows]
    return [
        [(name, float(name in key)) for name in row] for row, key in zip(rows, keys, strict=True)
    ]


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_samples: int) -> None:
    for num_right in range(num_samples + 1):
        right = [n < num_right for n in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = [any(chosen) for chosen in combinations(right, k)]
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(mean(subsets), abs=1e-12)


@given(num_samples=st.integers(1, 2000), data=st.data())
def test_pass_at_k_grows_with_k_and_stays_a_probability(
    num_samples: int, data: st.DataObject
) -> None:
    num_right = data.draw(st.integers(0, num_samples))

    values = [pass_at_k(num_samples, num_right, k) for k in reported_ks(num_samples)]

    assert values == sorted(values) and 0 <= values[0] <= values[-1] <= 1
    assert values[0] == pytest.approx(num_right / num_samples, abs=1e-12)
    assert values[-1] == float(num_right > 0)


def test_pass_at_k_of_few_samples_is_unbiased_for_k_fresh_ones() -> None:
    noise = random.Random(0)
    right = 0.3

    guesses = [pass_at_k(6, sum(noise.random() < right for _ in range(6)), 4) for _ in range(20000)]

    assert mean(guesses) == pytest.approx(1 - 0.7**4, abs=4 * 0.4 / 20000**0.5)


@given(rows=prompts())
def test_majority_is_the_expected_rightness_of_the_commonest_answer(
    rows: list[list[tuple[str | None, float]]],
) -> None:
    for row in rows:
        names = [name for name, _ in row if name is not None]
        most = max((names.count(name) for name in names), default=0)
        tied = sorted({name for name in names if names.count(name) == most})
        rightness = dict(row)
        expected = mean(rightness[name] for name in tied) if tied else 0.0

        assert majority(*zip(*row, strict=True)) == pytest.approx(expected, abs=1e-12)


def test_majority_counts_answers_and_not_right_samples() -> None:
    assert majority(["7", "8", "8", None], [1, 0, 0, 0]) == 0
    assert majority(["7", "7", "8", None, None, None], [1, 1, 0, 0, 0, 0]) == 1
    assert majority(["7", "8"], [1, 0]) == 0.5
    assert majority([None, None], [0, 0]) == 0


@given(rows=prompts())
def test_one_sample_makes_all_estimates_the_same(
    rows: list[list[tuple[str | None, float]]],
) -> None:
    first = [row[:1] for row in rows]

    found = prompt_accuracies(
        [[a for a, _ in row] for row in first], [[r for _, r in row] for row in first]
    )

    assert list(found) == ["pass@1", "maj@1"]
    assert found["pass@1"] == found["maj@1"] == [row[0][1] for row in first]


def test_reported_k_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [reported_ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_interval_of_a_share_is_that_of_the_normal_law() -> None:
    numbers = {"share": [1.0] * 300 + [0.0] * 700, "other": [0.0] * 300 + [1.0] * 700}

    found = estimates(numbers, seed=7)

    half = NormalDist().inv_cdf(0.975) * (0.3 * 0.7 / 1000) ** 0.5
    value, low, high = found["share"]
    assert value == pytest.approx(0.3)
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.004)
    # one set of resamples for both: what one gains the other loses
    assert found["other"].low == pytest.approx(1 - high)


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=30), seed=st.integers(0, 2**63 - 1))
def test_interval_holds_the_mean_and_lies_within_the_values(values: list[float], seed: int) -> None:
    (found,) = estimates({"x": values}, seed=seed).values()

    assert found == estimates({"x": values}, seed=seed)["x"]
    assert found.value == pytest.approx(float(np.mean(values)), abs=1e-12)
    assert min(values) - 1e-12 <= found.low <= found.high <= max(values) + 1e-12


def test_seed_moves_an_interval_a_little() -> None:
    numbers = {"x": [float(n % 3 == 0) for n in range(100)]}

    one, two = (estimates(numbers, seed=seed)["x"] for seed in (1, 2))

    assert one.value == two.value
    assert (one.low, one.high) != (two.low, two.high)
    assert (one.low, one.high) == pytest.approx((two.low, two.high), abs=0.03)


def test_metrics_have_the_ends_beside_the_value() -> None:
    found = estimate_metrics(estimates({"pass@2": [1.0, 1.0]}, seed=0), "eval")

    assert found == {"eval/pass@2": 1.0, "eval/pass@2_low": 1.0, "eval/pass@2_high": 1.0}


def test_answers_that_differ_in_spaces_only_are_one() -> None:
    answers = [Judged.of(text, 0.0, {}, 3).answer for text in (" 1  000\n", "1 000")]

    assert answers == ["1 000", "1 000"]
