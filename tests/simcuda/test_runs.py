"""Whole runs on simulated devices: they end, in an order that ends on NCCL too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.simcuda.conftest import Simulated
from tests.simcuda.orders import Operation, problems, read
from tests.simcuda.programs.runs import RUNS

PROGRAM = Path(__file__).parent / "programs" / "runs.py"
WHOLE = [name for name in RUNS if not name.endswith("steps")]
Started = Mapping[str, Mapping[int, Sequence[Operation]]]


@pytest.fixture(scope="module")
def started(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """Run -> rank -> what it started on its groups."""
    folder = tmp_path_factory.mktemp("runs")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    simulated(*torchrun, PROGRAM, folder, *WHOLE, log=folder / "log", seconds=280)
    return read(folder / "log")


@pytest.mark.parametrize("name", WHOLE)
def test_run_starts_what_nccl_can_end(started: Started, name: str) -> None:
    ranks = started[name]

    assert set(ranks) == set(range(RUNS[name][1]))
    assert all(any(each.backend == "nccl" for each in operations) for operations in ranks.values())
    assert problems(ranks) == []
