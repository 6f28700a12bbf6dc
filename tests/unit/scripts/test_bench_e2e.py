"""Predicted against measured: the statistics on known values, the drawing, the file of runs."""

from __future__ import annotations

import argparse
import importlib
import math
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.house import REPOSITORY


@pytest.fixture(scope="module", autouse=True)
def scripts() -> object:
    """scripts/ is importable while these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))
        yield


@pytest.fixture
def correlation() -> ModuleType:
    """scripts/bench/_correlation.py."""
    return importlib.import_module("bench._correlation")


@pytest.fixture
def configuration() -> ModuleType:
    """scripts/bench/_configuration.py."""
    return importlib.import_module("bench._configuration")


@pytest.fixture
def e2e() -> ModuleType:
    """scripts/bench/e2e.py."""
    return importlib.import_module("bench.e2e")


def test_equal_values_share_the_mean_of_their_places(correlation: ModuleType) -> None:
    assert correlation.ranks([3.0, 1.0, 3.0, 2.0, 3.0]) == [4.0, 1.0, 4.0, 2.0, 4.0]
    assert correlation.ranks([5.0, 5.0]) == [1.5, 1.5]


def test_spearman_has_its_known_values(correlation: ModuleType) -> None:
    assert correlation.spearman([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert correlation.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # 1 - 6 * sum of squared differences / (n (n^2 - 1)) = 1 - 6 * 4 / 120
    assert correlation.spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    assert math.isnan(correlation.spearman([1, 2, 3], [4, 4, 4]))
    with pytest.raises(ValueError, match="got 2 and 3 values"):
        correlation.spearman([1, 2], [1, 2, 3])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_spearman_with_ties_is_pearsons_of_counted_places(pairs: list[tuple[int, int]]) -> None:
    one, other = zip(*pairs)
    found = importlib.import_module("bench._correlation").spearman(one, other)

    if min(len(set(one)), len(set(other))) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(np.corrcoef(_places(one), _places(other))[0, 1])


def _places(values: tuple[int, ...]) -> list[float]:
    """By definition: how many are smaller, and half of the others that are equal."""
    return [sum(v < value for v in values) + (values.count(value) - 1) / 2 + 1 for value in values]


def test_ceiling_of_runs_that_repeat_exactly_is_1(correlation: ModuleType) -> None:
    assert correlation.split_half([[2.0] * 4, [1.0] * 4, [3.0] * 4]) == pytest.approx(1)


def test_ceiling_is_the_mean_over_all_ways_to_halve_the_repeats(correlation: ModuleType) -> None:
    swapped = [[1.0, 2.0], [2.0, 1.0]]
    # run 0 | 1, 2: 1 < 2.4, 2.5 > 1.1; 1 | 0, 2: 2 > 1, 2 > 1.8; 2 | 0, 1: 3 > 1.2, 1.5 < 1.7
    three = [[1.0, 2.0, 3.0], [2.4, 1.0, 1.2]]

    assert correlation.split_half(swapped) == pytest.approx(-1)
    assert correlation.split_half(three) == pytest.approx((-1 + 1 - 1) / 3)


def test_ceiling_needs_as_many_repeats_of_all(correlation: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"got \[1, 2\] repeats"):
        correlation.split_half([[1.0, 2.0], [1.0]])
    with pytest.raises(ValueError, match=r"got \[1\] repeats"):
        correlation.split_half([[1.0], [1.0]])


def test_chosen_plan_has_the_least_predicted_seconds_and_its_loss(correlation: ModuleType) -> None:
    choice = correlation.chosen([3.0, 1.0, 2.0], [5.0, 4.4, 4.0])

    assert (choice.index, choice.rank) == (1, 2)
    assert choice.loss == pytest.approx(0.1)
    assert correlation.chosen([1.0, 1.0], [2.0, 2.0]).rank == 1


def test_drawing_is_the_seeds_and_has_no_configuration_twice(configuration: ModuleType) -> None:
    found = list(islice(configuration.drawn(3), 200))

    assert found == list(islice(configuration.drawn(3), 200))
    assert found != list(islice(configuration.drawn(4), 200))
    assert len({one.title for one in found}) == 200
    for name, values in (
        ("num_ranks", {1, 2, 4}),
        ("actor", set(configuration.ENGINES)),
        ("generator", set(configuration.GENERATORS)),
    ):
        assert {getattr(one, name) for one in found} == values


def test_every_drawn_placement_is_one_that_the_settings_accept(configuration: ModuleType) -> None:
    import yaml

    from spmdflow.config.placement import resolve_placement

    for num_ranks, placements in configuration.PLACEMENTS.items():
        for text in placements.values():
            pools = resolve_placement(
                yaml.safe_load(text), ("actor", "critic", "reference", "reward"), num_ranks
            )
            assert {rank for pool in pools.values() for rank in pool.ranks} == set(range(num_ranks))


def test_runs_are_kept_and_those_of_another_workload_refused(
    e2e: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "runs.jsonl"
    key = {"steps": 5}
    assert e2e.load_runs(path, key) == {}

    for title, repeat, seconds in (("a", 0, 1.5), ("b", 0, 2.5), ("a", 1, 1.25)):
        e2e.keep_run(path, key, title, repeat, seconds)

    assert e2e.load_runs(path, key) == {"a": {0: 1.5, 1: 1.25}, "b": {0: 2.5}}
    with pytest.raises(ValueError, match="give another --runs FILE"):
        e2e.load_runs(path, {"steps": 6})


def test_verdict_divides_by_the_ceiling_once_all_runs_are_there(e2e: ModuleType) -> None:
    rows = [
        {"configuration": name, "predicted_s": guess, "measured_s": time}
        for name, guess, time in (("a", 1.0, 2.0), ("b", 2.0, 1.0), ("c", 3.0, 3.0))
    ]

    full = e2e.verdict(rows, [[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]], 3)
    part = e2e.verdict(rows, [[2.0, 2.0]], 4)

    assert "Spearman 0.500, split-half ceiling 1.000, part of it 0.500" in full
    assert "chosen: a, rank 2 of 3, 100.0% behind the best" in full
    assert "3 of 4 configurations have runs, 1 all" in part and "no ceiling" in part


def test_drawn_configurations_that_the_plan_refuses_are_left_out(
    e2e: ModuleType, configuration: ModuleType
) -> None:
    arguments = argparse.Namespace(hardware="cpu", steps=3)
    model = e2e.BUNDLED
    make = configuration.Configuration

    fine = make(2, "colocate", "megatron-t2", "fsdp", "zero3", "builtin")
    odd = make(2, "split", "megatron-t2", "fsdp", "zero3", "builtin")

    assert e2e.predicted(fine, model, arguments) > 0
    assert e2e.predicted(odd, model, arguments) is None
