"""Memory that a plan predicts against peaks that the train engines have when they are traced.

    python -m pytest tests/simcuda/test_traced_memory.py -m "slow or not slow" -s

prints the whole table: GiB traced, GiB planned, error, seconds. A pipeline's stages count as one:
the plan knows the fullest one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from spmdflow.mapping.hardware import load_hardware
from tests.simcuda.conftest import Simulated
from tests.simcuda.memory_cases import CASES, SMALL

pytestmark = pytest.mark.drill

PROGRAM = Path(__file__).parent / "programs" / "traced_memory.py"
TOLERANCE = 0.05
Peaks = Mapping[tuple[str, str], tuple[float, float]]
"""(case without its stage, phase) -> bytes traced, planned."""


def peaks_of(run: Simulated, names: list[str]) -> Peaks:
    """Traces the cases in one process."""
    lines = run(PROGRAM, *names, seconds=1500).splitlines()
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for traced in (json.loads(line) for line in lines if line.startswith("{")):
        case = CASES[traced["case"]]
        for phase, parts in case.planned().items():
            key = (replace(case, stage=0).name, phase)
            planned = sum(parts.values())
            found[key] = max(found.get(key, (0.0, 0.0))[0], traced[phase]), planned
            gib = f"{found[key][0] / 2**30:.2f} | {planned / 2**30:.2f}"
            error = f"{planned / found[key][0] - 1:+.1%}"
            print(f"| {case.name} | {phase} | {gib} | {error} | {traced['seconds']} |")
    return found


def check(peaks: Peaks) -> None:
    """Each prediction is near, and no device is said to be large enough that is not."""
    whole = load_hardware("h100")
    for key, (traced, planned) in peaks.items():
        assert planned == pytest.approx(traced, rel=TOLERANCE), key
        for ratio in (0.8, 0.9, 0.95, 1.0, 1.02, 1.05, 1.2):
            # a device whose memory, less what the context takes, is this part of the trace
            device = replace(whole, memory_bytes=traced * ratio + whole.reserved_bytes)
            has_room = traced <= device.memory_bytes - device.reserved_bytes
            assert has_room or planned > device.usable_bytes, (key, ratio)
        roomy = replace(whole, memory_bytes=(1.06 * traced + 3e9) / whole.usable_memory_fraction)
        assert planned <= roomy.usable_bytes, key


def test_predicted_memory_is_near_the_traced_peak_of_engines(simulated: Simulated) -> None:
    check(peaks_of(simulated, list(SMALL)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", sorted({case.size for case in CASES.values()} - {"tiny"}))
def test_predicted_memory_is_near_the_traced_peak_at_every_size(
    size: str, simulated: Simulated
) -> None:
    check(peaks_of(simulated, [name for name, case in CASES.items() if case.size == size]))
