"""Whole runs on simulated devices: they end, in an order that ends on NCCL too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.simcuda.conftest import Simulated
from tests.simcuda.orders import Operation, problems, read
from tests.simcuda.programs.runs import RUNS, WITH_VLLM

pytestmark = pytest.mark.drill

PROGRAM = Path(__file__).parent / "programs" / "runs.py"
PLAIN = [name for name in RUNS if not name.endswith("steps") and name not in WITH_VLLM]
FIRST, *OTHERS = WITH_VLLM
"""The first runs with every push, after the plain runs and in their processes."""
Started = Mapping[str, Mapping[int, Sequence[Operation]]]


def start(simulated: Simulated, folder: Path, *wanted: str, **more: bool) -> Started:
    """Run -> rank -> what it started on its groups, of those whose engines are installed."""
    missing = [name for name in ("vllm", "megatron") if find_spec(name) is None]
    names = [name for name in wanted if not any(package in name for package in missing)]
    if not names:
        return {}
    num_ranks = max(RUNS[name][1] for name in names)
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    simulated(*torchrun, PROGRAM, folder, *names, log=folder / "log", **more)
    return read(folder / "log")


def check(started: Started, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No problem in the order; prints how much there was to compare."""
    if name not in started:
        pytest.skip("its engines are not installed")
    ranks = started[name]

    assert set(ranks) == set(range(RUNS[name][1]))
    assert all(any(each.backend == "nccl" for each in operations) for operations in ranks.values())
    assert problems(ranks) == []
    messages = [each.is_message for operations in ranks.values() for each in operations]
    with capsys.disabled():
        print(f"\n{name}: {messages.count(False):,} collectives, {sum(messages):,} messages")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all that runs with every push."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def started(simulated: Simulated, folder: Path) -> Started:
    """Of all that runs with every push."""
    return start(simulated, folder, *PLAIN, FIRST)


@pytest.mark.parametrize("name", [*PLAIN, FIRST])
def test_run_starts_what_nccl_can_end(
    started: Started, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(started, name, capsys)


@pytest.mark.parametrize("name", [name for name in PLAIN if "megatron" not in name])
def test_sums_over_devices_are_made_in_float32(started: Started, name: str) -> None:
    """Gradients above all; Megatron sums activations too, in the precision of its layers."""
    reduced = [
        (each.op, dtype)
        for operations in started[name].values()
        for each in operations
        for _, dtype in each.shapes
        if each.backend == "nccl" and "reduce" in each.op
    ]

    assert reduced and {dtype for _, dtype in reduced} <= {"Float", "Double", "Long"}


def test_resumed_run_makes_the_third_step_only(started: Started, folder: Path) -> None:
    metrics = folder / f"run-{PLAIN.index('grpo, fsdp')}" / "metrics.jsonl"

    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]

    assert steps[-1] == 3 and steps.count(2) == 1, steps


def test_saved_tensors_are_finite(started: Started, folder: Path) -> None:
    """Copies in pinned memory hold NaN until the host has waited for them."""
    files = [*folder.glob("run-*/checkpoints/**/*.safetensors")]
    for file in files:
        for name, tensor in load_file(file).items():
            assert not tensor.is_floating_point() or tensor.isfinite().all(), (file, name)

    assert len(files) >= len(PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_run_with_vllm_starts_what_nccl_can_end(
    simulated: Simulated, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(start(simulated, tmp_path, name), name, capsys)


@pytest.mark.slow
def test_run_with_vllm_and_transformer_engine_starts_what_nccl_can_end(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "grpo, megatron p2, vllm t2, copy"
    check(start(simulated, tmp_path, name, transformer_engine=True), name, capsys)
