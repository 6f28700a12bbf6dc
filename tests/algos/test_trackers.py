"""A run and its resumption with every tracker that is installed here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from spmdflow.kind.registry import TRACKERS
from tests.algos.runs import FEW_SUMS, ROOT, finish, log_of, start, steps_of

SMALL = (
    *FEW_SUMS,
    *("data.prompts_per_step=4", "data.samples_per_prompt=4", "actor.update.mini_batch_size=16"),
    *("eval_every=0", "save_every=1", "run.sample_every=1"),
)


@pytest.mark.slow
def test_run_and_its_resumption_reach_every_installed_tracker(tmp_path: Path) -> None:
    names = [name for name in TRACKERS if importlib.util.find_spec(name)]
    assert "tensorboard" in names
    run_dir = tmp_path / "run"
    variables = {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_MODE": "offline"}
    script = [str(ROOT / "algos" / "grpo.py"), "--inproc", f"run.dir={run_dir}", *SMALL]
    settings = [f"run.trackers=[{','.join(names)}]"]
    ids = []
    for steps in (2, 3):
        command = [sys.executable, "-m", "spmdflow.run", *script, *settings, f"total_steps={steps}"]
        process = start(command, log_of(run_dir), variables)
        assert finish(process) == 0, log_of(run_dir).read_text()[-3000:]
        ids.append((run_dir / "tracker_id").read_text())

    assert [step["step"] for step in steps_of(run_dir)] == [1, 2, 3]
    assert ids[0] == ids[1] and "it is disabled until" not in log_of(run_dir).read_text()
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    for name in names:
        assert [path for path in written if name in str(path.relative_to(tmp_path))], name
    if "mlflow" in names:
        (facts,) = (json.loads(path.read_text()) for path in run_dir.rglob("facts.json"))
        assert facts["total_steps"] == 3 and facts["run.trackers"] == names
        assert {"versions.torch", "git.commit", "git.dirty"} <= set(facts)
