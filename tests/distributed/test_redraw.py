"""Noise of repeated generations: bitwise the same on any ranks, in any calls, after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.programs import redraw

pytestmark = pytest.mark.drill

Drawn = dict[str, dict[str, list[dict[str, list[int]]]]]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory, spawn_ranks: Any) -> Drawn:
    """Case -> phase and step -> the responses by row id of each of three generations."""
    out = tmp_path_factory.mktemp("redraw")
    spawn_ranks(redraw.run_all, 4, str(out))
    return {case: json.loads(Path(out / f"{case}.json").read_text()) for case in redraw.CASES}


@pytest.mark.parametrize("case", ["two", "four", "halves", "other pool"])
def test_three_generations_are_the_same_on_any_ranks_and_in_any_calls(
    drawn: Drawn, case: str
) -> None:
    assert drawn[case] == drawn["one"]


def test_resumed_run_draws_what_the_uninterrupted_one_draws(drawn: Drawn) -> None:
    assert list(drawn["stopped"]) == ["train 1", "held out 1"]
    assert list(drawn["stopped, resumed"]) == ["train 2", "held out 2"]
    assert drawn["stopped"] | drawn["stopped, resumed"] == drawn["one"]


def test_no_generation_repeats_another_one_of_its_step(drawn: Drawn) -> None:
    for made in drawn["one"].values():
        for one, other in ((0, 1), (0, 2), (1, 2)):
            equal = sum(made[one][row] == made[other][row] for row in made[one])
            assert equal <= 0.1 * len(made[one])  # all of them, with one noise for every generation


def test_held_out_rows_are_drawn_alike_in_every_step(drawn: Drawn) -> None:
    assert drawn["one"]["held out 1"] == drawn["one"]["held out 2"]
    assert drawn["one"]["train 1"] != drawn["one"]["train 2"]
