"""A plan's second prediction: rows of different lengths, assumed or given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmdflow.config.load import load
from spmdflow.plan.__main__ import FINE, REFUSED, main
from spmdflow.plan.report import PlanReport, plan
from spmdflow.plan.spread import MEAN_SHARE, Spread
from spmdflow.plan.text import plan_text
from spmdflow.plan.workload import hardware_of
from tests.unit.planned import ALGORITHMS, SMALL_GROUPS, settings_of

H100 = hardware_of("h100")


def planned(*settings: str, script: str = "grpo", world: int = 4, **more: Any) -> PlanReport:
    small = SMALL_GROUPS if script.startswith("grpo") else ()
    loaded = load(ALGORITHMS / f"{script}.py", None, [*small, *settings])
    return plan(
        loaded.script,
        loaded.cfg,
        settings_of(world, node_size=8, backend="nccl", **more),
        H100,
        variation=1.0,
    )


@pytest.mark.parametrize(("mean", "most"), [(100, 4000), (1060, 3966), (3206, 3989)])
def test_spread_has_its_mean_and_its_cut(mean: int, most: int) -> None:
    lengths = Spread(mean, most).lengths(2048)

    assert lengths.mean() == pytest.approx(mean, rel=1e-3)
    assert lengths.min() >= 1 and lengths.max() <= most


def test_spread_is_lognormal_with_its_coefficient_of_variation() -> None:
    lengths = Spread(1000, 1 << 30, 0.5).lengths(4096)

    logarithms = np.log(lengths)
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.02)
    assert logarithms.std() == pytest.approx(np.sqrt(np.log(1.25)), rel=0.01)


def test_spread_gives_the_same_lengths_again_in_no_order() -> None:
    lengths = Spread(100, 400).lengths(64)

    assert lengths.tolist() == Spread(100, 400).lengths(64).tolist()
    assert lengths.tolist() != sorted(lengths.tolist())


def test_step_with_assumed_lengths_is_longer_if_they_vary() -> None:
    words = ("actor.rollout.max_new_tokens=512",)

    report = planned(*words, examples={"responses": 100})

    assert report.varied is not None
    assert "mean 100, coefficient of variation 1, at most 512" in report.varied.lengths
    one = report.prediction
    varied = report.varied.prediction
    assert varied.stage_seconds()["generate_sequences"] > one.stage_seconds()["generate_sequences"]
    assert varied.seconds > one.seconds
    assert varied.tokens == pytest.approx(one.tokens, rel=0.05)


def test_without_an_assumption_the_mean_is_half_of_the_largest_length() -> None:
    report = planned("actor.rollout.max_new_tokens=512")

    assert report.varied is not None
    assert report.varied.prediction.tokens < report.prediction.tokens
    assert f"mean {MEAN_SHARE * 512:.0f}" in report.varied.lengths
    assert "nothing is assumed" in report.varied.lengths


def test_lengths_that_are_given_count_as_they_are() -> None:
    words = ("actor.rollout.max_new_tokens=512",)

    report = planned(*words, examples={"responses": [20, 20, 20, 400]})

    assert report.varied is not None and "own lengths" in report.varied.lengths
    (note,) = (note for timed in report.varied.prediction.calls for note in timed.notes)
    assert "the longest of 400 tokens" in note


def test_largest_length_that_is_assumed_cannot_vary() -> None:
    assert planned("actor.rollout.max_new_tokens=64", examples={"responses": 64}).varied is None


def test_rows_of_one_length_from_a_data_set_have_no_second_prediction() -> None:
    assert planned(script="sft").varied is None


def test_both_predictions_are_in_the_text() -> None:
    report = planned("actor.rollout.max_new_tokens=512", examples={"responses": 100})

    text = plan_text(report)

    lines = text.splitlines()
    assert "a step predicted" in lines[1] and lines[2].startswith("       with rows of one length;")
    assert "  if lengths vary: generate_sequences" in text
    assert max(map(len, lines)) <= 100


def test_both_predictions_are_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(ALGORITHMS / "grpo.py"), *SMALL_GROUPS, "--world=2", "--hardware=h100", "--json"]

    assert main([*words, "--no-data"]) == FINE
    varied = json.loads(capsys.readouterr().out)["seconds"]["varied"]
    assert main([*words, "--no-data", "--spread=0"]) == FINE
    without = json.loads(capsys.readouterr().out)["seconds"]["varied"]

    assert varied["step"] > 0 and "lognormal" in varied["lengths"]
    assert without is None


@pytest.mark.parametrize("value", ["-1", "11"])
def test_spread_out_of_range_is_refused(
    value: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([str(ALGORITHMS / "grpo.py"), f"--spread={value}"]) == REFUSED
    assert f"got --spread {value}, expected a number from 0 to 10" in capsys.readouterr().err


def test_generation_that_was_begun_a_step_ahead_takes_what_training_does_not_cover() -> None:
    words = ("actor.rollout.max_new_tokens=512", "actor.rollout.engine=vllm")
    seconds = {}
    for staleness in (0, 1):
        report = planned(*words, f"max_staleness={staleness}", script="grpo_async")
        seconds[staleness] = report.prediction.stage_seconds()

    rest = sum(s for method, s in seconds[1].items() if method != "finish_sequences")
    whole = seconds[0]["finish_sequences"]
    assert whole > rest
    assert seconds[1]["finish_sequences"] == pytest.approx(whole - rest, rel=0.1)
