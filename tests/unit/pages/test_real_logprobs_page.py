"""docs/lab/real_logprobs.json has what its test measures, and how that counts near ties."""

from __future__ import annotations

import json

import pytest

from tests.distributed.real_logprobs import (
    ENGINES,
    FORMS,
    GENERATORS,
    MOST_NEAR_TIES,
    NEAR,
    PAGE,
    TOLERANCE,
    Greedy,
    compare,
)

SURE = 2.0
"""A margin that no order of sums changes."""


def test_page_has_every_engine_and_generator_within_the_tolerance() -> None:
    made = json.loads(PAGE.read_text(encoding="utf-8"))

    engines = [f"{each['engine']}:{each['layout']}:{each['ranks']}" for each in made["engines"]]
    assert tuple(engines) == ENGINES
    assert tuple(each["generator"] for each in made["generators"]) == GENERATORS
    gaps = [each[form] for each in made["engines"] for form in FORMS]
    gaps += [each["log_probs"] for each in made["generators"]]
    assert all(gap < TOLERANCE for gap in gaps)
    assert all(each["near_ties"] <= MOST_NEAR_TIES for each in made["generators"])


def response_of(tokens: list[int], margins: list[float]) -> Greedy:
    return Greedy(tokens, [-1.0] * len(tokens), margins)


@pytest.mark.parametrize(
    ("tokens", "margin", "num_equal", "num_near", "num_faults"),
    [
        ([5, 6, 7], SURE, 3, 0, 0),
        ([5, 8, 9], NEAR / 2, 1, 1, 0),
        ([5, 8, 9], NEAR * 2, 1, 0, 1),
        ([5], NEAR / 2, 1, 0, 1),  # it ended without an end token
        ([5, 6, 7, 8], NEAR / 2, 3, 0, 1),
    ],
)
def test_token_that_differs_is_a_fault_unless_transformers_had_a_near_tie_there(
    tokens: list[int], margin: float, num_equal: int, num_near: int, num_faults: int
) -> None:
    expected = response_of([5, 6, 7], [SURE, margin, SURE])

    found = compare([tokens], [[-1.0] * len(tokens)], [expected])

    assert found.tokens == num_equal
    assert (len(found.near_ties), len(found.faults)) == (num_near, num_faults)


@pytest.mark.parametrize("wrong", [-1.5, float("nan")])
def test_log_prob_that_differs_is_counted_also_if_it_is_no_number(wrong: float) -> None:
    found = compare([[5, 6]], [[-1.0, wrong]], [response_of([5, 6], [SURE, SURE])])

    assert not found.gap < TOLERANCE
    assert found.faults == []
