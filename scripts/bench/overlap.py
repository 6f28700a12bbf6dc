"""Seconds per step with generation one step ahead, against waiting for it, on two disjoint pools.

`algos/grpo_async.py` and the same script without its lookahead, on the bundled task: one rank
trains, one generates. Accuracy is greedy, on held-out problems, after the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "waiting": Path(__file__).parent / "_grpo_sync.py",
    "one step ahead": ROOT / "algos" / "grpo_async.py",
}
WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long."""
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, by turns")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way and repeat: median seconds of a step and of its parts."""
    rows = []
    for number in range(arguments.repeats):
        waited = 0.0
        for name, script in SCRIPTS.items():
            row = {"way": name, **_run(script, arguments.steps, seed=number)}
            waited = waited or row["step_s"]
            rows.append({**row, "ratio": row["step_s"] / waited})
    return rows


def _run(script: Path, steps: int, *, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "-m", "spmdflow.run", str(script)]
        settings = [f"total_steps={steps}", f"eval_every={steps}", "save_every=0"]
        settings += [f"run.dir={folder}/run", f"run.seed={seed}", "run.sample_every=0"]
        subprocess.run(
            [*command, str(ROOT / "algos" / "grpo_async.yaml"), *settings],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            check=True,
            timeout=1800,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    timed = [row for row in found if WARM_UP < row["step"] < steps]  # the last one evaluates
    median = {key: statistics.median(row.get(key, 0.0) for row in timed) for key in _COLUMNS}
    accuracy = {row["step"]: row["eval/accuracy"] for row in found if "eval/accuracy" in row}
    return {
        **{column: median[key] for key, column in _COLUMNS.items()},
        "accuracy_start": accuracy[min(accuracy)],
        "accuracy_end": accuracy[max(accuracy)],
    }


_COLUMNS = {
    "time/step_seconds": "step_s",
    "time/generate_sequences_seconds": "generate_s",
    "time/update_actor_seconds": "update_s",
    "time/receive_weights_seconds": "weights_s",
}
