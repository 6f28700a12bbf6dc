"""PPO and GRPO in bfloat16 on one GPU, from end to end, and a table of what they took.

`python -m pytest -m gpu tests/gpu/test_algorithms.py` prints the table (docs/lab/GPU.md).
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algos.runs import ROOT, SCRIPT, finish, log_of, steps_of, torchrun
from tests.algos.test_grpo import GRPO
from tests.algos.test_grpo import SMALL as SMALL_GRPO

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
BFLOAT16 = ("actor.model.dtype=bfloat16", "actor.rollout.dtype=bfloat16")
VLLM = ("actor.rollout.engine=vllm",)
MEGATRON = ("actor.engine.kind=megatron", *VLLM)
ENGINES = {
    "fsdp, builtin": ("actor.rollout.engine=builtin",),
    "fsdp, vllm": VLLM,
    "megatron, blocks": (*MEGATRON, "actor.rollout.weights=blocks"),
    "megatron, flat": (*MEGATRON, "actor.rollout.weights=flat"),
    "offloaded": (
        *VLLM,
        "actor.engine.offload=[parameters,gradients,optimizer]",
        "critic.engine.offload=[parameters,gradients,optimizer]",
    ),
}
MAX_DRIFT = 0.05
"""Mean |log-prob gap| between rollout and trainer in bfloat16."""


def run(run_dir: Path, *settings: str, script: Path, **named: Any) -> list[dict[str, Any]]:
    """The steps of a run on one GPU; skips where an engine is not installed."""
    for package in ("vllm", "megatron"):
        if any(package in word for word in settings) and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    num_ranks = named.pop("num_ranks", 1)
    process = torchrun(run_dir, *settings, num_ranks=num_ranks, script=script, **named)
    assert finish(process, seconds=850) == 0, log_of(run_dir).read_text()[-3000:]
    return steps_of(run_dir)


def check_certified(steps: list[dict[str, Any]]) -> None:
    """Every sync of a step; weights that an evaluation has brought need none in the next step."""
    found = [
        step["rollout/weights_verified"] for step in steps if "rollout/weights_verified" in step
    ]
    assert found and set(found) == {1}


def show(name: str, steps: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """One line: seconds of each stage and tokens a second, medians over the steps."""
    done = [step for step in steps if step["step"] > 1] or steps
    keys = sorted({key for step in done for key in step if key.startswith(("time/", "perf/"))})
    values = {key: sorted(step.get(key, 0.0) for step in done)[len(done) // 2] for key in keys}
    with capsys.disabled():
        device = torch.cuda.get_device_name()
        print(f"\n{device} | {name} |", ", ".join(f"{k} {v:.4g}" for k, v in values.items()))


@pytest.mark.parametrize("engine", ENGINES)
def test_ppo_in_bfloat16_runs_certified_and_without_drift(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    critic = () if "megatron" not in engine else ("critic.engine.kind=megatron",)
    settings = (*BFLOAT16, "critic.model.dtype=bfloat16", *ENGINES[engine], *critic)

    steps = run(tmp_path / "run", *settings, "total_steps=4", script=SCRIPT)

    check_certified(steps)
    for step in steps[1:]:
        assert all(math.isfinite(value) for value in step.values())
        assert step["rollout/drift"] <= MAX_DRIFT
        assert step["controller/tensor_bytes"] == 0
    show(f"ppo, {engine}", steps, capsys)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "offloaded"])
def test_grpo_in_bfloat16_runs_certified_and_without_drift(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*BFLOAT16, *ENGINES[engine], "total_steps=4")

    steps = run(tmp_path / "run", *settings, script=GRPO, small=SMALL_GRPO)

    check_certified(steps)
    for step in steps[1:]:
        assert all(math.isfinite(value) for value in step.values())
        assert step["rollout/drift"] <= MAX_DRIFT
    show(f"grpo, {engine}", steps, capsys)


@pytest.mark.parametrize("engine", ["fsdp, vllm", "megatron, blocks"])
def test_grpo_over_two_devices_compares_samples_of_both(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices here, 2 needed")
    settings = (*BFLOAT16, *ENGINES[engine], "total_steps=4")

    for name in ("one", "two"):  # the second run finds what vLLM compiled in the first
        steps = run(tmp_path / name, *settings, script=GRPO, small=SMALL_GRPO, num_ranks=2)

    check_certified(steps)
    assert all(step["rollout/drift"] <= MAX_DRIFT for step in steps[1:])
    show(f"grpo, {engine}, two devices", steps, capsys)


@pytest.mark.parametrize("script", [SCRIPT, GRPO], ids=["ppo", "grpo"])
def test_bundled_task_is_learned_in_bfloat16(
    tmp_path: Path, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run(tmp_path / "run", *BFLOAT16, script=script, small=())

    accuracy = {s["step"]: s["eval/accuracy"] for s in steps if "eval/accuracy" in s}
    assert accuracy[max(accuracy)] >= 0.9 > accuracy[0] + 0.2
    show(f"{script.stem}, bundled task", steps, capsys)


def test_policy_and_generator_on_two_devices_one_step_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices here, 2 needed")
    script = ROOT / "algos" / "grpo_async.py"
    settings = (*BFLOAT16, *VLLM, "actor.rollout.weights=copy", "total_steps=4")

    steps = run(tmp_path / "run", *settings, script=script, small=SMALL_GRPO, num_ranks=2)

    check_certified(steps)
    show("grpo_async on two devices", steps, capsys)
