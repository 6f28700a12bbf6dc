"""Seconds of the transition from training with t4 to generation with t2, on 4 gloo ranks.

Each system's figure is the median of several transitions, and its ratio that to a plain collective
in the same round: for systems inside a pool an all_gather by which each rank receives M/4, as the
paper's engine does; for two_copies (2 ranks train with t2, 2 generate with t2) plain messages of
the same bytes between the same ranks, all at once. Reference and systems take turns, so that other
work on the machine meets all of them. Run by scripts/bench.py hybrid.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench._cost import Case, Cost, cost_of
from bench._systems import Seat, System, groups_of, system_of
from spmdflow.blocks.box import Box
from spmdflow.hybrid_engine.reshard import ReshardPlan
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import BUCKET_BYTES
from spmdflow.weights.table import parameters

ROOT = Path(__file__).parents[2]
MODEL = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "num_hidden_layers": 8,
}
"""63.4 M parameters, untied."""
ROWS = (
    "hybridflow flat",
    "hybridflow flat, all-gather",
    "hybridflow blocks",
    "hybridflow copy",
    "hybridflow_v",
    "ds_chat",
    "two_copies",
    "shared",
)
SIZES = {"tp_size": 4, "gen_tp_size": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many rounds."""
    parser.add_argument("--rounds", type=int, default=7, help="transitions of each system")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each system."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        paths = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
        subprocess.run(
            [*command, "--nproc-per-node=4", __file__, folder, str(arguments.rounds)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            check=True,
            timeout=900,
        )
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return rows


@dataclass
class Bench:
    """One row's objects on this rank."""

    cost: Cost
    system: System
    plain: Callable[[], object]
    group: dist.ProcessGroup


def cases() -> dict[str, Case]:
    """By row."""
    arch = Architecture.from_config(MODEL)
    pool = Case(arch, Layout((0, 1, 2, 3), **SIZES), bucket_bytes=BUCKET_BYTES)
    apart = replace(pool, layout=Layout((0, 1), tp_size=2), rollout=Layout((2, 3), tp_size=2))
    found = dict.fromkeys(ROWS, pool) | {"two_copies": apart}
    found["hybridflow flat, all-gather"] = replace(pool, gathers_rows=True)
    return found


def run_rank(folder: Path, rounds: int) -> None:
    """What every rank of the torchrun of four does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    groups = GroupTable(dist.get_rank(), timeout_seconds=120)
    rows = [measured(row, case, rank, groups, rounds) for row, case in cases().items()]
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measured(row: str, case: Case, rank: int, groups: GroupTable, rounds: int) -> dict[str, Any]:
    """One row; the system is gone afterwards."""
    from bench._counters import WireCounter, peak_allocated
    from bench._link import seconds_of

    bench = built(row, case, rank, groups)
    values = whole_values(case.arch)
    bench.system.load(partial(part_of, values))
    with WireCounter() as wire:
        bench.system.transition()
    check(bench.system, values)
    planned = bench.cost.received[rank].total
    assert wire.received == planned, (row, wire.received, planned)
    bench.system.release()
    most, _ = peak_allocated(bench.system.transition)
    seconds = []
    plain = []
    for _ in range(rounds):
        bench.system.release()
        plain.append(seconds_of(bench.plain, bench.group))
        seconds.append(seconds_of(bench.system.transition, bench.group))
    peak = bench.cost.training[rank].total + most
    by_rank: list[Any] = [None] * 4
    dist.all_gather_object(by_rank, (wire.received, planned, peak))
    return _row(row, seconds, plain, by_rank)


def _row(
    row: str, seconds: list[float], plain: list[float], by_rank: list[tuple[int, int, int]]
) -> dict[str, Any]:
    moved, planned, peak = (max(column) for column in zip(*by_rank, strict=True))
    return {
        "system": row,
        "seconds": statistics.median(seconds),
        "plain seconds": statistics.median(plain),
        "ratio": statistics.median(a / b for a, b in zip(seconds, plain, strict=True)),
        "bytes moved": moved,
        "bytes planned": planned,
        "peak bytes": peak,
    }


def built(row: str, case: Case, rank: int, groups: GroupTable) -> Bench:
    """The system, and the plain way that it is compared with."""
    from bench._link import all_gather, messages

    name, _, mode = row.partition(",")[0].partition(" ")
    cost = cost_of(name, case, mode=mode)
    everyone = tuple(range(4))
    wanted = [everyone, *Layout(everyone, **SIZES).axis_groups("micro_dp"), *groups_of(cost)]
    groups.make(GroupSpec(ranks, "compute", "gloo") for ranks in wanted)
    group = groups.get(everyone)
    seat = Seat(rank, groups, torch.float32, torch.device("cpu"), 120.0)
    system = system_of(case, cost, seat)
    if name == "two_copies":
        return Bench(cost, system, messages(rank, edges_of(cost), group), group)
    pair = Layout(everyone, **SIZES).axis_group(rank, "micro_dp")
    quarter = cost_of("hybridflow", replace(case, gathers_rows=False), mode="blocks")
    plain = all_gather(quarter.received[rank].total, groups.get(pair))
    return Bench(cost, system, plain, group)


def edges_of(cost: Cost) -> list[tuple[int, int, int]]:
    """(source, destination, bytes) of all that a plan sends."""
    assert isinstance(cost.plan, ReshardPlan)
    found: dict[tuple[int, int], int] = {}
    for bucket in cost.plan.buckets:
        for message in bucket.messages:
            for destination in message.destinations:
                edge = message.source, destination
                size = message.num_elements * cost.plan.element_bytes
                found[edge] = found.get(edge, 0) + size
    return [(*edge, size) for edge, size in sorted(found.items())]


def whole_values(arch: Architecture) -> dict[str, torch.Tensor]:
    """The same random model on every rank."""
    generator = torch.Generator().manual_seed(0)
    return {p.name: torch.randn(p.shape, generator=generator) for p in parameters(arch)}


def part_of(values: dict[str, torch.Tensor], name: str, box: Box) -> torch.Tensor:
    """The values of a box."""
    return values[name][box.slices()]


def check(system: System, values: dict[str, torch.Tensor]) -> None:
    """What generation reads is the model."""
    for name, view, box in system.generation():
        assert torch.equal(view, part_of(values, name, box)), (system.cost.system, name, box)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
