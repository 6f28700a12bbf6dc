"""500 steps with evaluation and saving: memory, descriptors, threads and files do not grow.

scripts/slow.sh tests/algos/test_soak.py
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.algos.runs import finish, log_of, ranks_of, torchrun

NUM_STEPS = 500
SETTLED = 150
"""Steps of the run; those after which nothing is new to any cache."""
MOST_GROWTH = {"memory": 1.5, "descriptors": 0.5, "threads": 0.5, "files": 1.0}
"""In 100 steps, by the line of least squares: MB of a rank's own memory, or so many."""


def looked_at(pid: int) -> dict[str, float]:
    """What a rank has; {} if it has just ended."""
    folder = Path(f"/proc/{pid}")
    try:
        lines = (folder / "status").read_text().splitlines()
        found = {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
        return {
            "memory": int(found["RssAnon"]) / 1024,
            "threads": int(found["Threads"]),
            "descriptors": len(list((folder / "fd").iterdir())),
        }
    except (OSError, KeyError):
        return {}


@pytest.mark.slow
def test_nothing_grows_over_500_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = (f"total_steps={NUM_STEPS}", "save_every=10", "eval_every=10")
    process = torchrun(run_dir, *settings, num_ranks=2)
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    lines = run_dir / "metrics.jsonl"
    while process.poll() is None:
        time.sleep(1.0)
        step = len(lines.read_bytes().splitlines()) if lines.exists() else 0
        if not SETTLED <= step < NUM_STEPS:
            continue
        for rank, pid in enumerate(pid for pid in ranks_of(run_dir) if pid != process.pid):
            for name, value in looked_at(pid).items():
                series[f"{name} of rank {rank}"].append((step, value))
        series["files"].append((step, sum(1 for _ in run_dir.rglob("*"))))
    assert finish(process) == 0, log_of(run_dir).read_text()[-4000:]

    growth = {}
    for name, points in series.items():
        steps, values = np.array(points, dtype=float).T
        slope, _ = np.polyfit(steps, values, 1)
        growth[name] = 100 * float(slope)
        print(f"{name}: {values[0]:.1f} -> {values[-1]:.1f}, {growth[name]:+.2f} in 100 steps")
    assert len(growth) == 7
    assert {name: x for name, x in growth.items() if x > MOST_GROWTH[name.split()[0]]} == {}
