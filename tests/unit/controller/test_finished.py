"""RUN_DIR/finished: exists only after the last step, and tells finished from stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from types import ModuleType

from spmdflow import program
from spmdflow.controller.flow import Flow
from spmdflow.controller.script import STOPPED
from spmdflow.program import load_settings
from tests.algos.runs import ROOT

TASK = ROOT / "algos" / "arithmetic"
SCRIPT = ROOT / "tests" / "algos" / "programs" / "long_step.py"
SETTINGS = (
    f"actor.model.path={TASK / 'model'}",
    f"data.train_path={TASK / 'train.jsonl'}",
    "data.max_prompt_tokens=16",
    "actor.rollout.max_new_tokens=8",
    "eval_every=0",
    "run.sample_every=0",
)


def run(
    run_dir: Path, *settings: str, stop_in: int | None = None, leave_in: int | None = None
) -> int:
    """Steps without a model. In stop_in the run is asked to end; in leave_in main returns."""

    def main(flow: Flow, cfg: object) -> None:
        for step in flow.steps(cfg.total_steps):  # type: ignore[attr-defined]
            if step.number == stop_in:
                signal.raise_signal(signal.SIGTERM)
            if step.number == leave_in:
                return

    script = ModuleType("steps_alone")
    script.main = main  # type: ignore[attr-defined]
    cfg = load_settings(SCRIPT, None, [*SETTINGS, *settings, f"run.dir={run_dir}"])
    return program.launch(script, cfg, inproc=True)


def test_run_is_marked_as_finished_after_its_last_step(tmp_path: Path) -> None:
    status = run(tmp_path, "total_steps=2")

    assert status == 0
    assert (tmp_path / "finished").read_text() == "step 2\n"


def test_run_whose_script_leaves_its_loop_early_is_finished_after_that_step(tmp_path: Path) -> None:
    status = run(tmp_path, "total_steps=5", leave_in=2)

    assert status == 0
    assert (tmp_path / "finished").read_text() == "step 2\n"


def test_run_that_a_signal_stopped_is_not_finished(tmp_path: Path) -> None:
    status = run(tmp_path, "total_steps=3", stop_in=1)

    assert status == STOPPED
    assert not (tmp_path / "finished").exists()


def test_run_that_its_time_limit_stopped_is_not_finished(tmp_path: Path) -> None:
    status = run(tmp_path, "total_steps=3", "run.max_seconds=1")

    assert status == 0
    assert not (tmp_path / "finished").exists()


def test_finished_run_that_goes_on_to_more_steps_and_stops_is_finished_no_more(
    tmp_path: Path,
) -> None:
    run(tmp_path, "total_steps=1")

    run(tmp_path, "total_steps=3", stop_in=1)

    assert not (tmp_path / "finished").exists()
