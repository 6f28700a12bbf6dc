"""The simulated device itself: it refuses what CUDA and NCCL refuse, and counts what it should."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.simcuda.behaviours import BEHAVIOURS
from tests.simcuda.conftest import Simulated


@pytest.fixture(scope="module")
def found(simulated: Simulated) -> Mapping[str, str]:
    """Behaviour -> how it failed."""
    output = simulated(Path(__file__).with_name("behaviours.py"))
    return dict(json.loads(output.splitlines()[-1]))


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_device_behaves_as_cuda(found: Mapping[str, str], name: str) -> None:
    assert not found[name], found[name]


def test_peak_of_a_rank_is_that_of_its_device_whichever_device_is_current(
    simulated: Simulated,
) -> None:
    """Lanes are threads, and each thread begins with device 0 as its current one."""
    output = simulated(Path(__file__).parent / "programs" / "peak_memory.py")

    mib = 1 << 20
    assert json.loads(output.splitlines()[-1]) == [8 * mib, 4 * mib]
