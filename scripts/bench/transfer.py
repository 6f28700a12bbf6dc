"""Round trips of rows between two disjoint pools of two ranks, as a script sees them.

One round trip: `right.echo(batch)` moves the payload column to the right pool, which writes a copy;
`left.touch(...)` moves that copy back; the clock stops when the script has the answer. The payload
is made once, outside the clock. Run by scripts/bench.py transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from spmdflow.config.schema import DataConfig, EngineConfig, RunConfig
from spmdflow.controller.script import run_flow
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import Worker

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "algos" / "arithmetic"
SIZES_MB = (1, 16, 64)
ROWS = 64
WARM_UP = 3
REPEATS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: sizes and repeats are fixed, so that figures can be compared."""


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each size: milliseconds of a round trip."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [*command, "--nproc-per-node=4", __file__, folder],
            env=environment,
            check=True,
            timeout=300,
        )
        found = json.loads((Path(folder) / "run" / "transfer.json").read_text())
    return [{"payload": size, **numbers} for size, numbers in found.items()]


@dataclass
class _Part:
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass
class Config:
    """Two pools, one data file."""

    run: RunConfig
    data: DataConfig
    placement: Any
    left: _Part = field(default_factory=_Part)
    right: _Part = field(default_factory=_Part)
    total_steps: int = 1
    eval_every: int = 0


class LeftWorker(Worker):
    """Makes the payload and takes the copy."""

    role = "left"

    @register(transfer_mode="DP_PROTO", reads=("prompts",), writes=("payload",), extends=True)
    def make(self, batch: TensorDict, *, row_bytes: int) -> TensorDict:
        """payload: (B, row_bytes / 4) float32."""
        rows = batch.batch_size[0]
        return TensorDict({"payload": torch.ones(rows, row_bytes // 4)}, batch_size=[rows])

    @register(transfer_mode="DP_METRIC", reads=("copy",))
    def touch(self, batch: TensorDict) -> dict[str, float]:
        """Reads the copy and answers with its first value."""
        return {"first": float(batch["copy"][0, 0])}


class RightWorker(Worker):
    """Gives the payload back."""

    role = "right"

    @register(transfer_mode="DP_PROTO", reads=("payload",), writes=("copy",))
    def echo(self, batch: TensorDict) -> TensorDict:
        """copy: the payload."""
        return TensorDict({"copy": batch["payload"]}, batch_size=batch.batch_size)


def main(flow: Any, cfg: Config) -> None:
    """Measure every size; writes RUN_DIR/transfer.json."""
    left = flow.spawn(LeftWorker, cfg.left)
    right = flow.spawn(RightWorker, cfg.right)
    prompts = flow.prompts(cfg.data)
    found = {}
    for _ in flow.steps(1):
        rows = next(prompts)
        for size in SIZES_MB:
            seconds = [
                _round_trip(left, right, rows, (size << 20) // ROWS)
                for _ in range(WARM_UP + REPEATS)
            ]
            found[f"{size} MB"] = _summary(seconds[WARM_UP:])
    assert cfg.run.dir is not None
    (Path(cfg.run.dir) / "transfer.json").write_text(json.dumps(found))


def _round_trip(left: Any, right: Any, rows: Any, row_bytes: int) -> float:
    batch = left.make(rows, row_bytes=row_bytes)
    batch.lengths("payload")  # waits until it is made
    started = time.perf_counter()
    assert left.touch(right.echo(batch))["first"] == 1.0
    return time.perf_counter() - started


def _summary(seconds: list[float]) -> dict[str, float]:
    milliseconds = np.array(seconds) * 1e3
    return {
        "p50_ms": round(float(np.percentile(milliseconds, 50)), 2),
        "p95_ms": round(float(np.percentile(milliseconds, 95)), 2),
    }


def run_rank(folder: Path) -> None:
    """What every rank of the torchrun of four does."""
    dist.init_process_group("gloo")
    pools = {
        "one": {"roles": ["left"], "ranks": [0, 1]},
        "two": {"roles": ["right"], "ranks": [2, 3]},
    }
    data = DataConfig(
        train_path=str(MODEL / "train.jsonl"),
        tokenizer_path=str(MODEL / "model"),
        prompts_per_step=ROWS,
    )
    run = RunConfig(dir=str(folder / "run"), sample_every=0)
    run_flow(sys.modules["bench.transfer"], Config(run, data, pools))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import bench.transfer  # every rank finds the classes under this name

    bench.transfer.run_rank(Path(sys.argv[1]))
