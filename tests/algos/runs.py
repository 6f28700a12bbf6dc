"""Runs of algos/*.py on the bundled task, small enough for tests, and how to compare them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.checkpoint.tensors import read_tensors
from tests import forked
from tests.metrics_page import unknown_metrics

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "algos" / "ppo.py"
FEW_SUMS = (
    f"data.train_path={ROOT}/tests/algos/sums/train.jsonl",
    f"data.eval_path={ROOT}/tests/algos/sums/eval.jsonl",
)
"""The first 256 and 64 rows of the bundled task: reading all of it takes a fifth of a tiny run."""
SMALL_STEPS = (
    "data.prompts_per_step=16",
    "actor.update.mini_batch_size=8",
    "critic.update.mini_batch_size=8",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "critic.optimizer.schedule=constant",
    "critic.optimizer.warmup_steps=0",
    "data.eval_prompts=16",
    "advantage.kl_coef=0.02",
    "run.sample_every=0",
    "save_every=0",
    "run.save_last=false",
)
"""Steps of 16 prompts, of any task."""
SMALL = (*FEW_SUMS, *SMALL_STEPS)
LIMIT = 800.0
"""Seconds after which a run or a wait counts as hung, on a slow machine with other work too."""


def torchrun(
    run_dir: Path,
    *settings: str,
    num_ranks: int,
    script: Path = SCRIPT,
    small: Sequence[str] = SMALL,
    rendezvous: Sequence[str] = ("--standalone",),
) -> subprocess.Popen[str]:
    """Start a run of ppo.py, or another script, under torchrun; its output goes to a file."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    words = [f"--nproc-per-node={num_ranks}", "-m", "spmdflow.run", str(script)]
    return start([*launcher, *words, f"run.dir={run_dir}", *small, *settings], log_of(run_dir))


def run_ranks(
    run_dir: Path,
    *settings: str,
    num_ranks: int,
    script: Path = SCRIPT,
    small: Sequence[str] = SMALL,
    seconds: float = LIMIT,
    status: int = 0,
) -> None:
    """The whole run, which ends with this status; Python is not started anew (tests/forked.py)."""
    words = [f"--nproc-per-node={num_ranks}", "-m", "spmdflow.run", str(script)]
    log = log_of(run_dir)
    words += [f"run.dir={run_dir}", *small, *settings]
    forked.torchrun(words, log, seconds=seconds, status=status)


def start(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command of the checkout in a session of its own; its output goes to log."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with open(log, "a") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **own, **(variables or {})},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def log_of(run_dir: Path) -> Path:
    """Where a run's output is."""
    return run_dir.with_name(run_dir.name + ".log")


def finish(process: subprocess.Popen[str], *, seconds: float = LIMIT) -> int:
    """Wait for torchrun; what is left after the limit is killed with its process group."""
    try:
        return process.wait(seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_step(run_dir: Path, step: int, *, seconds: float = LIMIT) -> None:
    """Until metrics.jsonl has the step."""
    wait_until(
        lambda: any(done["step"] >= step for done in steps_of(run_dir)), run_dir, seconds=seconds
    )


def wait_until(condition: Callable[[], bool], run_dir: Path, *, seconds: float = LIMIT) -> None:
    """Until condition() holds; after the limit the end of the run's log is shown."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, log_of(run_dir).read_text()[-3000:]
        time.sleep(0.02)


def steps_of(run_dir: Path, *, own: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl; own: metrics that the script adds, which no glossary names."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    steps = [json.loads(line) for line in lines]
    assert unknown_metrics({name for step in steps for name in step} - {"step", *own}) == []
    return steps


def check_prediction(run_dir: Path) -> None:
    """RUN_DIR/prediction.json: rows and weights had the planned bytes, edge by edge."""
    found = json.loads((run_dir / "prediction.json").read_text())
    assert found["steps"], found["notes"]
    odd = [edge for edge in found["edges"] if edge[2] != edge[3]]
    odd += [sync for sync in found["weight_syncs"] if sync["planned"] != sync["counted"]]
    assert odd == [] and found["bytes_agree"]


def check_same_numbers(
    run_dir: Path,
    others: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    rel: float = 2e-5,
    abs: float = 1e-6,
) -> list[dict[str, Any]]:
    """The steps of a run that moved the planned bytes, none of them through the controller, and
    has another run's numbers up to float32 sums in another order."""
    check_prediction(run_dir)
    steps = steps_of(run_dir)
    for mine, other in zip(steps, others, strict=True):
        for name in ("step", *(name for name in names if name in other)):
            assert mine[name] == pytest.approx(other[name], rel=rel, abs=abs), name
    assert all(step["controller/tensor_bytes"] == 0 for step in steps if step["step"])
    return steps


def numbers_of(run_dir: Path) -> list[dict[str, Any]]:
    """Every metric but those of a clock."""
    skipped = ("time/", "perf/")
    return [
        {name: value for name, value in step.items() if not name.startswith(skipped)}
        for step in steps_of(run_dir)
    ]


def last_checkpoint(run_dir: Path) -> dict[str, bytes]:
    """Bytes of every tensor of the latest checkpoint, by file and name."""
    folder = run_dir / "checkpoints"
    latest = folder / (folder / "latest").read_text().strip()
    found = {}
    for path in sorted(latest.rglob("rank-*.safetensors")):
        for name, tensor in read_tensors(path)[0].items():
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{path.relative_to(latest)}:{name}"] = raw
    return found


def ranks_of(run_dir: Path) -> list[int]:
    """Pids of the processes of a run, torchrun's too, by its directory on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"run.dir={run_dir}".encode() in words:
                found.append(int(entry.name))
    return sorted(found)


def kill_ranks(run_dir: Path) -> None:
    """kill -9 of every process of a run, torchrun too; some may end by themselves meanwhile."""
    for pid in ranks_of(run_dir):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
