"""scripts/real_matrix.py: its cases fit the scripts, and its page says where the plan is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.matrix.case import MODEL, Case
from scripts.matrix.page import missed_bytes, missed_seconds, refusals, table_of
from scripts.matrix.table import CASES
from spmdflow.config.load import load

ROOT = Path(__file__).parents[3]
BUNDLED = ROOT / "algos" / "arithmetic" / "model"
"""A folder that is always there; the real model is not."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_settings_of_every_case_fit_its_script(case: Case, tmp_path: Path) -> None:
    script, *words = case.words(str(tmp_path / "run"))
    files = [ROOT / word for word in words if word.endswith(".yaml")]

    settings = [word.replace(MODEL, str(BUNDLED)) for word in words if "=" in word]

    cfg = load(ROOT / script, files[0] if files else None, settings).cfg

    assert cfg.run.dir == str(tmp_path / "run")
    assert cfg.total_steps >= 2, "the first step is not counted"


def test_names_are_used_once_and_other_settings_are_another_key() -> None:
    names = {case.name for case in CASES}
    keys = {case.key for case in CASES}

    assert len(names) == len(keys) == len(CASES)
    assert {case.resumes for case in CASES} - {""} <= names


def record_of(predicted: float, planned: float) -> dict[str, Any]:
    """A case of two ranks whose step took 2 s, and whose fuller rank took 1 GB."""
    phase = {"measured": [1_000_000_000, 900_000_000], "planned": planned, "parts": {"kv": planned}}
    return {
        "name": "sums",
        "state": "ran",
        "ranks": 2,
        "seconds": {"step": [predicted, 2.0], "compute_reward": [0.0, 0.1]},
        "memory": {"actor.update_actor": phase, "reward.build": {**phase, "planned": None}},
        "metrics": {},
    }


def test_prediction_within_the_bounds_is_no_miss() -> None:
    record = record_of(2.39, 1.04e9)

    assert len(list(missed_seconds([record]))) == len(list(missed_bytes([record]))) == 2
    assert "| sums | 2 | 2.0 | 2.4 | 1.20 | 1.00, 0.90 | 1.04 | 1.04 | - |" in table_of([record])


def test_miss_is_listed_with_the_stage_or_the_parts_of_the_phase() -> None:
    record = record_of(1.5, 1.2e9)

    assert list(missed_seconds([record]))[2:] == ["| sums | step | 1.50 | 2.00 | 0.75 |"]
    assert list(missed_bytes([record]))[2:] == [
        "| sums | actor.update_actor | 1.20 | 1.00 | 1.20 | kv 1.20 |"
    ]


def test_cases_refused_for_one_reason_are_one_line() -> None:
    records = [
        {"name": name, "state": "refused", "text": "rollout.weights=blocks: got a | b"}
        for name in ("one", "two")
    ]

    assert list(refusals(records))[2:] == ["| one, two | rollout.weights=blocks: got a / b |"]
