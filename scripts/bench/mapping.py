"""Seconds of the device mapping's search, or with --cells how it compares with the paper's cells.

Each search runs in a process of its own, so nothing is cached: what is timed is `find_mapping`
from the dataflow to the ten best placements, without Python's start and imports, in seconds and,
as other work on the machine changes those, in CPU seconds. --plot draws their growth. --cells
scores the 13 placements of the HybridFlow paper with the checked-in coefficients and prints its
other figures, and with --draws N the scores when every coefficient is moved by up to 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench._cells import CELLS, Score, family_allocation, scaled, score_cell
from bench._dataflows import NOMINAL, ppo, safe_rlhf
from bench._event import event_scores
from bench._figures import (
    VOLUMES,
    actor_share,
    generation_seconds,
    scaling,
    transition_ratio,
    volumes,
)
from spmdflow.mapping.dataflow import Dataflow, Workload
from spmdflow.mapping.hardware import COEFFICIENTS, Hardware, load_hardware
from spmdflow.mapping.partition_search import find_mapping
from spmdflow.mapping.placed import explain, reason

ROOT = Path(__file__).parents[2]
WORKLOAD = Workload(1024, 1024, 1024, num_updates=8)
CASES = (
    ("4 models, whole nodes", 13, 13, 4, (16, 64, 256, 1024, 4096)),
    ("4 models, 13B and 70B, whole nodes", 13, 70, 4, (32, 128, 512, 1024, 4096)),
    ("5 models, whole nodes", 13, 13, 5, (16, 64, 256, 1024)),
    ("4 models, single GPUs", 13, 13, 4, (16, 64, 256, 1024)),
)
"""Name, billions of actor and critic, models, GPUs."""
UNMOVED = ("gpus_per_node",)
"""Counts, not coefficients."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure."""
    parser.add_argument("--cells", action="store_true", help="score the paper's placements")
    parser.add_argument("--draws", type=int, default=0, metavar="N", help="perturbed scores")
    parser.add_argument("--explain", action="store_true", help="the best five of each cell")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the growth of the search")
    parser.add_argument("--repeat", type=int, default=3, help="processes for each search")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each search, or for each cell."""
    if arguments.cells:
        return measure_cells(arguments)
    rows = [
        {
            "case": name,
            "GPUs": gpus,
            "seconds": statistics.median(wall for wall, _ in runs),
            "CPU seconds": statistics.median(cpu for _, cpu in runs),
            "most CPU seconds": max(cpu for _, cpu in runs),
        }
        for name, actor, critic, models, sizes in CASES
        for gpus in sizes
        for runs in [_cold_runs(name, actor, critic, models, gpus, arguments.repeat)]
    ]
    if arguments.plot:
        draw(rows, arguments.plot)
    return rows


def measure_cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each cell and variant; the paper's other figures are printed."""
    hardware = load_hardware("a100_80gb")
    rows = []
    for log_prob in (False, True):
        scores = [score_cell(cell, hardware, log_prob=log_prob) for cell in CELLS]
        rows += [_row(score, log_prob) for score in scores]
        print(f"log_prob={log_prob}: {_verdict([score.ratio for score in scores])}")
        imposed = [score_cell(c, hardware, log_prob=log_prob, imposed=True) for c in CELLS]
        print(f"  trained with the paper's sizes: {_verdict([one.ratio for one in imposed])}")
        for one in imposed:
            if one.ratio > 1.01:
                best = one.mapping.best[0].title
                print(f"    {one.cell.models}@{one.cell.num_gpus}: {one.ratio:.3f}, ours {best}")
        if arguments.explain:
            for score in scores:
                print(f"\n{score.cell.models} on {score.cell.num_gpus}; paper: {score.cell.choice}")
                print(explain(score.mapping, count=5))
        efficiency = scaling(hardware, log_prob=log_prob)
        mean = statistics.mean(efficiency.values())
        print(f"  strong scaling {mean:.3f} (paper 0.668): {_rounded(efficiency)}")
        share = statistics.mean(actor_share(score.paper) for score in scores[:3])
        print(f"  actor's training and generation, 13B up to 64 GPUs: {share:.3f} (paper 0.589)")
        if arguments.draws:
            drawn = perturbed(range(arguments.draws), log_prob=log_prob)
            print(f"  every coefficient within 15 %, {len(drawn)} draws: {_spread(drawn)}")
    print_figures(hardware)
    print(f"event simulator (separate result): {event_scores(hardware)}")
    return rows


def print_figures(hardware: Hardware) -> None:
    """Figures 14 and 15 and Table 2's volumes."""
    for name, (received, wanted) in volumes().items():
        print(f"{name} {VOLUMES[name][0]}: {received / 1e9:.4f} GB (Table 2: {wanted / 1e9:.4f})")
    ours, copies = transition_ratio(hardware)
    print(
        f"figure 14, 70B: {ours:.1f} s, two copies {copies:.1f} s, ratio {copies / ours:.2f} (9.1)"
    )
    for name, best in (("7B", 2), ("13B", 4)):
        seconds = generation_seconds(name, hardware)
        print(f"figure 15, {name}: {_rounded(seconds)}, paper's best t_g {best}")


def perturbed(draws: range, *, log_prob: bool) -> list[int]:
    """Cells won in each draw, coefficients moved independently and evenly within 15 %."""
    hardware = load_hardware("a100_80gb")
    won = []
    for seed in draws:
        rng = np.random.default_rng(seed)
        moved = hardware
        for name in COEFFICIENTS:
            if name not in UNMOVED:
                moved = scaled(moved, name, float(rng.uniform(0.85, 1.15)))
        scores = [score_cell(cell, moved, log_prob=log_prob, keep=1) for cell in CELLS]
        won.append(sum(score.ratio <= 1.01 for score in scores))
    return won


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds over GPUs, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), dpi=120)
    for name in dict.fromkeys(row["case"] for row in rows):
        points = [(row["GPUs"], row["CPU seconds"]) for row in rows if row["case"] == name]
        axes.plot(*zip(*points), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="CPU seconds, cold")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def _cold_runs(
    name: str, actor: int, critic: int, models: int, gpus: int, repeat: int
) -> list[tuple[float, float]]:
    """(seconds, CPU seconds) of each process."""
    unit = 1 if "single" in name else 8
    command = [sys.executable, __file__, str(actor), str(critic), str(models), str(gpus), str(unit)]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
    return [
        json.loads(
            subprocess.run(
                command,
                env=os.environ | {"PYTHONPATH": paths},
                check=True,
                capture_output=True,
                text=True,
                timeout=600,
            ).stdout
        )
        for _ in range(repeat)
    ]


def _dataflow(actor: int, critic: int, models: int) -> Dataflow:
    a = NOMINAL[f"{actor}B"]
    c = NOMINAL[f"{critic}B"]
    if models == 4:
        return ppo(a, c, reference=a, reward=c, workload=WORKLOAD)
    return safe_rlhf(a, c, reference=a, reward=c, cost=c, workload=WORKLOAD)


def _row(score: Score, log_prob: bool) -> dict[str, Any]:
    best = score.mapping.best[0]
    return {
        "log_prob": log_prob,
        "models": score.cell.models,
        "GPUs": score.cell.num_gpus,
        "paper's choice": score.cell.choice,
        "ratio": score.ratio,
        "our choice": best.title,
        "sizes in the paper's pools": "+".join(
            map(str, family_allocation(score.cell, load_hardware("a100_80gb"), log_prob=log_prob))
        ),
        "tie": score.mapping.is_tie,
        "seconds": best.seconds,
        "why the paper's loses": reason(score.paper, best) if score.ratio > 1.01 else "",
    }


def _verdict(ratios: list[float]) -> str:
    return (
        f"{sum(r <= 1.01 for r in ratios)} of {len(ratios)} within 1 %, "
        f"{sum(r <= 1.05 for r in ratios)} within 5 %"
    )


def _spread(won: list[int]) -> str:
    counts = {score: won.count(score) for score in sorted(set(won))}
    return f"median {statistics.median(won)}, cells won: {counts}"


def _rounded(values: dict[Any, float]) -> dict[Any, float]:
    return {key: round(value, 3) for key, value in values.items()}


def _search_once(arguments: list[str]) -> None:
    actor, critic, models, gpus, unit = map(int, arguments)
    dataflow = _dataflow(actor, critic, models)
    hardware = load_hardware("a100_80gb")
    started = time.perf_counter()
    used = time.process_time()
    find_mapping(dataflow, hardware, gpus, unit=unit)
    print(json.dumps([time.perf_counter() - started, time.process_time() - used]))


if __name__ == "__main__":
    _search_once(sys.argv[1:])
