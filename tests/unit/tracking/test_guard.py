"""Which guards hold on series of metrics, planted and recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from spmdflow.config.guard import DEFAULT_GUARDS, guard_of
from spmdflow.errors import ConfigError
from spmdflow.tracking.guard import Guards, Trip

CURVES = Path(__file__).parents[3] / "docs" / "learning"


def tripped(texts: Iterable[str], series: Iterable[Mapping[str, float]]) -> list[tuple[int, Trip]]:
    """(place in the series, trip) of every guard that holds."""
    guards = Guards(list(texts))
    found = []
    for place, metrics in enumerate(series):
        found += [(place, trip) for trip in guards.trips(metrics, skipping=False)]
        guards.learn(metrics)
    return found


def of(name: str, *values: float) -> list[dict[str, float]]:
    return [{name: value} for value in values]


@pytest.mark.parametrize(
    ("text", "value", "base", "holds"),
    [
        ("actor/kl > 10: stop", 10.0, 0.0, False),
        ("actor/kl>1e1:stop", 10.5, 0.0, True),
        ("reward/mean < -0.5: warn", -0.6, 0.0, True),
        ("eval/pass@8 < 0.5 * best: stop", 0.2, 0.5, True),
        ("eval/accuracy < 0.5*best-0.1: stop", 0.2, 0.5, False),
        ("eval/accuracy < best - 0.3 : stop", 0.15, 0.5, True),
        ("actor/grad_norm > 10 * median + 1: warn", 21.0, 2.0, False),
    ],
)
def test_condition_is_read_as_it_is_written(
    text: str, value: float, base: float, holds: bool
) -> None:
    guard = guard_of(text)

    assert guard.exceeds(value, guard.limit(base)) == holds


@pytest.mark.parametrize(
    "text", ["", "actor/kl > 10", "actor/kl >= 10: stop", "kl = 3: warn", "kl < 2 * mean: warn",
             "kl < 1: halt", "kl < 1: stop, kl < 2: warn", "kl < 2 * 3: stop", "kl < -best: stop"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"run.guards: got .*, expected NAME < LIMIT: ACTION"):
        guard_of(text)


def test_condition_without_quotes_in_yaml_is_the_same() -> None:
    assert guard_of({"actor/kl > 10": "stop"}) == guard_of("actor/kl > 10: stop")


def test_skip_of_what_only_the_end_of_a_step_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected skip only for what is known before the update"):
        guard_of("eval/accuracy < 0.5: skip")


PLANTED = {
    "accuracy collapse": (of("eval/accuracy", 0.539, 0.0), "stop"),
    "reward collapse": (of("reward/mean", 0.7, 0.71, 0.74, 0.7, 0.72, 0.02), "warn"),
    "KL to the reference": (of("actor/reference_kl", 0.01, 0.2, 0.9, 31.0), "stop"),
    "KL of an update": (of("actor/approx_kl", 0.001, 0.02, 3e4), "stop"),
    "entropy collapse": (of("actor/entropy", 1.2, 0.7, 0.0), "warn"),
    "drift": (of("rollout/drift", 1e-6, 1e-6, 2.5), "stop"),
    "memory": (of("perf/host_growth", *(1 + step / 100 for step in range(52))), "warn"),
    "no number": (of("actor/approx_kl", 0.1, math.nan), "stop"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_default_guard_names_a_planted_fault_in_its_step(fault: str) -> None:
    series, action = PLANTED[fault]

    ((place, trip),) = tripped(DEFAULT_GUARDS, series)

    assert (place, trip.guard.action) == (len(series) - 1, action)
    assert trip.guard.name in trip.got and trip.guard.text in trip.expected


RARELY_RIGHT = ("real_gsm8k",)
"""Runs in which 0 to 5 of 128 samples are right: a step without any is chance, and a warning."""
LEARNING = sorted(file for file in CURVES.glob("*.json") if file.stem not in RARELY_RIGHT)


@pytest.mark.parametrize("file", LEARNING, ids=lambda file: file.stem)
def test_no_default_guard_holds_in_a_recorded_learning_run(file: Path) -> None:
    points = json.loads(file.read_text())["points"]
    num_seeds = len(next(iter(next(iter(points.values())).values())))
    steps = sorted({int(step) for curve in points.values() for step in curve})
    for seed in range(num_seeds):
        series = [
            {name: curve[str(step)][seed] for name, curve in points.items() if str(step) in curve}
            for step in steps
        ]

        assert tripped(DEFAULT_GUARDS, series) == []


def test_best_is_the_largest_below_and_the_smallest_above() -> None:
    falls = tripped(["x < 0.5 * best: warn"], of("x", 1.0, 4.0, 2.0, 1.9))
    rises = tripped(["x > 2 * best: warn"], of("x", 4.0, 1.0, 2.0, 2.1))

    assert [(place, trip.base, trip.limit) for place, trip in falls] == [(3, 4.0, 2.0)]
    assert [(place, trip.base, trip.limit) for place, trip in rises] == [(3, 1.0, 2.0)]


def test_median_needs_five_earlier_values() -> None:
    found = tripped(["x > 3 * median: warn"], of("x", 1, 9, 1, 1, 1, 9))

    assert [(place, trip.base) for place, trip in found] == [(5, 1.0)]


def test_factor_of_a_negative_value_says_nothing() -> None:
    assert tripped(["x < 0.5 * best: stop"], of("x", -2.0, -1.0, -3.0)) == []


def test_warning_is_told_at_powers_of_two() -> None:
    found = tripped(["x > 1: warn"], of("x", *[2.0] * 9))

    assert [trip.times for _, trip in found if trip.is_reported] == [1, 2, 4, 8]


def test_state_resumes_in_the_middle_of_a_series() -> None:
    texts = ["x < 0.5 * best: warn", "x > 2 * median: warn"]
    series = of("x", *(1 + math.sin(place) for place in range(2000)))
    whole = [(place, trip) for place, trip in tripped(texts, series)]
    first = Guards(texts)
    second = Guards(texts)
    found = []
    for place, metrics in enumerate(series):
        if place == 1234:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            first = second
        found += [(place, trip) for trip in first.trips(metrics, skipping=False)]
        first.learn(metrics)

    assert len(whole) > 100
    assert found == whole
    assert len(json.dumps(first.state_dict())) < 20_000, "bounded"


def test_median_of_many_values_is_that_of_all() -> None:
    guards = Guards(["x > 2 * median: warn"])
    for value in range(100_000):
        guards.learn({"x": float(value)})

    (trip,) = guards.trips({"x": 1e6}, skipping=False)

    assert trip.base == pytest.approx(50_000, rel=0.01)
