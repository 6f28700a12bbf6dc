"""FLOPs and utilization in closed form, and why they are unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spmdflow.mapping.hardware import FOLDER, load_hardware
from spmdflow.throughput.flops import compute_of, pass_flops
from spmdflow.throughput.measured_step import MeasuredStep
from tests.unit.throughput.run_files import LAUNCH, MODEL, step

FORWARD = 2 * 1000 * 400 + 2 * 100 * 320 + 4 * 10 * 5000
"""FLOPs of a forward over the rows of `step`: 800,000 + 64,000 + 200,000."""


def measured(seconds: float = 2.0) -> MeasuredStep:
    return MeasuredStep(
        1, 1, seconds, evaluates=False, saves=False, tokens=step(1, 0.0), metrics={}
    )


def launch(**changes: Any) -> dict[str, Any]:
    return {**LAUNCH, **changes}


def test_update_takes_three_forwards_an_epoch_and_two_if_only_adapters_are_trained() -> None:
    generate, update = step(1, 0.0)["passes"]

    assert pass_flops(generate, MODEL) == FORWARD == 1_064_000
    assert pass_flops(update, MODEL) == 2 * 3 * FORWARD
    assert pass_flops(update, {**MODEL, "adapters": True}) == 2 * 2 * FORWARD


def test_dense_row_without_an_output_layer_is_the_papers_formula_with_causal_attention() -> None:
    """6 N + 6 L H Q T a token: PaLM's 12 L H Q T counts the later tokens too."""
    fact = {"kind": "train", "epochs": 1, "tokens": 64, "head_tokens": 0, "attended": 64**2 / 2}
    model = {"adapters": False, "weights": {"matrices": 5000, "head": 7, "attention": 32}}

    assert pass_flops(fact, model) == 64 * (6 * 5000 + 6 * 32 * 64)


def test_mfu_is_flops_over_peak_devices_and_seconds() -> None:
    compute = compute_of([measured(2.0), measured(3.0)], LAUNCH)

    assert compute.by_kind == {"generate": 2 * FORWARD, "forward": 0, "train": 12 * FORWARD}
    assert compute.mfu == pytest.approx(14 * FORWARD / (989e12 * 4 * 5.0))
    assert "989 TFLOP/s in bfloat16 (h100: NVIDIA H100 data sheet" in compute.peak
    assert compute.unknown == ""


def test_each_precision_has_its_own_peak() -> None:
    model = {**MODEL, "precision": "float32"}

    compute = compute_of([measured(2.0)], launch(models={"actor": model}))

    ideal = FORWARD / 989e12 + 6 * FORWARD / 494e12
    assert compute.mfu == pytest.approx(ideal / (4 * 2.0))


def test_cpu_counts_with_the_hardware_that_the_run_recorded_and_with_its_cores() -> None:
    cpu = load_hardware("cpu")
    model = {**MODEL, "precision": "float32", "generator_precision": "float32"}
    sizes = {**LAUNCH["sizes"], "run.hardware": str(FOLDER / "cpu.yaml")}  # type: ignore[dict-item]
    facts = launch(device="CPU: any", sizes=sizes, models={"actor": model})

    compute = compute_of([measured(2.0)], facts)

    assert cpu.gpus_per_node == 2, "four ranks share the two cores of the file"
    assert compute.mfu == pytest.approx(7 * FORWARD / (cpu.peak_flops_float32 * 2 * 2.0))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "CPU: any"}, "no peak of CPU: any is recorded"),
        ({"device": "Device X"}, "no packaged file describes Device X; set run.hardware"),
        ({"device": "CPU: any", "sizes": {"run.hardware": "h100"}}, "does not describe CPU: any"),
        ({"device": "X", "sizes": {"run.hardware": "gone.yaml"}}, "hardware: got gone.yaml"),
        ({"models": {}}, "the sizes or lengths of actor.generate_sequences were not recorded"),
        ({"models": {"actor": MODEL, "judge": {**MODEL, "weights": None}}}, "judge are not known"),
    ],
)
def test_mfu_without_a_peak_or_sizes_is_unknown_with_the_reason(
    changes: dict[str, Any], why: str
) -> None:
    compute = compute_of([measured()], launch(**changes))

    assert compute.mfu is None
    assert why in compute.unknown


def test_step_with_rows_of_unknown_length_has_unknown_flops() -> None:
    record = step(1, 0.0)
    record["passes"][0] |= {"tokens": None, "head_tokens": None, "attended": None}

    compute = compute_of([replace(measured(), tokens=record)], LAUNCH)

    assert compute.by_kind == {} and "lengths of actor.generate_sequences" in compute.unknown


def test_packaged_files_of_gpus_have_the_peaks_that_utilization_needs(tmp_path: Path) -> None:
    for name in ("a100_80gb", "h100", "h200"):
        hardware = load_hardware(name)
        assert hardware.peak_flops_bfloat16 > hardware.peak_flops_float32 > 1e13
