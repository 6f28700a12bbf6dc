"""Runs combinations of the matrix, one after another, on the first ranks of the world.

Every rank calls `run_all`; RUN_DIR of each is out/<combination>.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from tests.algos.matrix import Combination, settings_of

ALGOS = Path(__file__).parents[3] / "algos"


def run_all(out: str, runs: tuple[tuple[str, str, str, str, int], ...]) -> None:
    """What every rank does."""
    for run in map(Combination._make, runs):
        settings = list(settings_of(run, f"{out}/{run}"))
        loaded = load(ALGOS / f"{run.script}.py", None, [*settings, "run.call_seconds=600"])
        check(loaded.cfg, run.world)
        run_flow(loaded.script, loaded.cfg, ranks=tuple(range(run.world)))
        dist.barrier()
