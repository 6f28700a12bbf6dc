"""A script whose KL weight adapts: it moves by the KL that was measured, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from tests.algos.runs import ROOT, numbers_of, steps_of
from tests.algos.test_grpo import GRPO, SMALL

SCRIPT = ROOT / "tests" / "algos" / "programs" / "adaptive_kl.py"
SETTINGS = (
    "advantage.kl_coef=0.1",
    "advantage.best_of=2",
    "actor.loss.kl_coef=0",
    "actor.optimizer.lr=1e-3",
    "eval_every=0",
    "save_every=1",
    "total_steps=3",
)


def run(run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    words = [*SMALL, *SETTINGS, *settings, f"run.dir={run_dir}"]
    loaded = load(SCRIPT, GRPO.with_suffix(".yaml"), words)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return steps_of(run_dir)


def test_weight_of_the_kl_follows_what_was_measured_and_resumes(tmp_path: Path) -> None:
    steps = run(tmp_path / "whole")
    run(tmp_path / "halves", "total_steps=2")
    run(tmp_path / "halves")

    weight = 0.1
    for step in steps:
        kl = step["advantage/measured_kl"]
        weight *= 1 + 0.1 * max(-0.2, min(0.2, kl / 0.5 - 1))
        assert step["kl_coef"] == pytest.approx(weight, rel=1e-5)
        assert kl == pytest.approx(step["actor/reference_kl_per_response"], abs=1e-6)
    assert steps[0]["kl_coef"] == pytest.approx(0.098)  # at the start there is no KL
    assert steps[-1]["advantage/measured_kl"] > 0
    assert numbers_of(tmp_path / "halves")[-1] == numbers_of(tmp_path / "whole")[-1]
