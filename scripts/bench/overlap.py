"""Seconds per step with generation ahead of training, against waiting for it, on two pools.

`algos/grpo_async.py` on the bundled task, or episodes with a tail of sleeping environments: one
rank trains, one generates. Accuracy is greedy, on held-out problems, after the last step.
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
HERE = Path(__file__).parent
TASKS = {
    "sums": [str(ROOT / "algos" / "grpo_async.py"), str(ROOT / "algos" / "grpo_async.yaml")],
    "sleeping": [
        str(HERE / "_agent_async.py"),
        str(ROOT / "algos" / "grpo_agent.yaml"),
        f"actor.rollout.episode.environment={HERE / '_sleeping_env.py'}:episode",
        "actor.rollout.episode.concurrency=256",
        "data.prompts_per_step=8",
        "actor.update.mini_batch_size=64",
        "placement=split",
    ],
}
WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What, and how long."""
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1], help="the first: 1.0")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, by turns")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each bound and repeat: mean seconds of a step and of its parts."""
    rows = []
    for number in range(arguments.repeats):
        waited = 0.0
        for bound in arguments.staleness:
            words = [*TASKS[arguments.task], f"max_staleness={bound}"]
            row = {"max_staleness": bound, **_run(words, arguments.steps, seed=number)}
            waited = waited or row["step_s"]
            rows.append({**row, "ratio": row["step_s"] / waited})
    return rows


def _run(words: list[str], steps: int, *, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "-m", "spmdflow.run", *words]
        settings = [
            f"total_steps={steps}",
            f"eval_every={steps}",
            "save_every=0",
            "run.save_last=false",
        ]
        settings += [f"run.dir={folder}/run", f"run.seed={seed}", "run.sample_every=0"]
        subprocess.run(
            [*command, *settings],
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
    mean = {key: statistics.mean(row.get(key, 0.0) for row in timed) for key in _COLUMNS}
    score = next(name for name in ("eval/accuracy", "eval/mean") if name in found[0])
    accuracy = {row["step"]: row[score] for row in found if score in row}
    return {
        **{column: mean[key] for key, column in _COLUMNS.items()},
        "accuracy_start": accuracy[min(accuracy)],
        "accuracy_end": accuracy[max(accuracy)],
    }


_COLUMNS = {
    "time/step_seconds": "step_s",
    "time/finish_sequences_seconds": "generate_s",
    "time/finish_episodes_seconds": "episodes_s",
    "rollout/age": "age",
    "rollout/age_max": "age_max",
    "time/update_actor_seconds": "update_s",
    "time/receive_weights_seconds": "weights_s",
}
