"""A training step on one long row, on ranks that divide it or on one rank that has it alone.

Usage: torchrun --nproc-per-node C _context_steps.py MODEL ATTENTION LENGTH STEPS FILE
FSDP with recomputation and the supervised loss. Rank 0 appends to FILE a line of JSON for each
step: its seconds, those in which the slowest rank waited for messages of attention, what all ranks
sent, and the largest resident memory of a rank.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from tensordict import TensorDict

from spmdflow.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.registry import resolve
from spmdflow.objectives.supervised import SupervisedLoss
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.context_group import ContextGroup, RingMessage
from spmdflow.workers.model import load_model

waited = [0.0]
"""Seconds of this rank in messages of attention, since the step began."""


def main() -> None:
    """Take the steps."""
    folder, attention, length, steps, file = sys.argv[1:]
    dist.init_process_group("gloo")
    count_waiting(ContextGroup, "all_to_all", "all_gather")
    count_waiting(RingMessage, "wait")
    engine = build(Path(folder), attention)
    take_step(engine, 256)  # memory is allocated, kernels are chosen
    for _ in range(int(steps)):
        dist.barrier()
        waited[0] = 0.0
        start = time.perf_counter()
        metrics = take_step(engine, int(length))
        seconds = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        largest = torch.tensor([seconds, waited[0], memory], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            names = ("seconds", "waiting", "memory")
            line = dict(zip(names, largest.tolist(), strict=True))
            line["bytes"] = float(metrics.get("context_bytes", 0.0))
            with Path(file).open("a") as lines:
                lines.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


def count_waiting(owner: type, *names: str) -> None:
    """Add the seconds of these methods to `waited`."""
    for name in names:
        method = getattr(owner, name)

        def timed(*arguments: Any, method: Callable[..., Any] = method) -> Any:
            start = time.perf_counter()
            result = method(*arguments)
            waited[0] += time.perf_counter() - start
            return result

        setattr(owner, name, timed)


def build(folder: Path, attention: str) -> Any:
    """An engine on all ranks."""
    size = dist.get_world_size()
    layout = Layout(tuple(range(size)), dp_size=1, cp_size=size)
    groups = GroupTable(dist.get_rank(), timeout_seconds=1800)
    axes = [(rank,) for rank in layout.ranks]
    for axis in ("tp", "pp", "dp", "cp", "weights", "shard", "replicate", "replica", "model"):
        axes += layout.axis_groups(axis)
    groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in [layout.ranks, *axes]])
    cfg = EngineConfig(kind="fsdp", options=["recompute"], context_attention=attention)
    context = WorkerContext("actor", layout, dist.get_rank(), groups, torch.device("cpu"), seed=0)
    return resolve(engine_kind("fsdp").implementation)(
        load_model(ModelConfig(path=str(folder), dtype="float32"), head="causal_lm"),
        cfg,
        context,
        optimizer=OptimizerConfig(lr=1e-6),
        total_optimizer_steps=100,
    )


def take_step(engine: Any, length: int) -> dict[str, Any]:
    """An optimizer step on one row, the same on all ranks."""
    draw = torch.Generator().manual_seed(1)
    prompt, response = (torch.randint(5, 900, (n,), generator=draw) for n in (1, length - 1))
    learnt = torch.ones_like(response, dtype=torch.bool)
    columns = {"prompts": [prompt], "responses": [response], "response_mask": [learnt]}
    batch = {name: ragged_from_rows(rows) for name, rows in columns.items()}
    rows = TensorDict(batch, batch_size=[1])
    return dict(engine.train_step(rows, SupervisedLoss(), num_micro_batches=1))


if __name__ == "__main__":
    main()
