"""What a run changes in its process for vLLM on CUDA, and what it puts back."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.parallel.allocator import VARIABLE, settings_for
from tests.simcuda.conftest import ROOT, Simulated

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_trainer_computes_on_its_own_stream_after_vllm_has_started(simulated: Simulated) -> None:
    *_, line = simulated(PROGRAMS / "vllm_stream.py").splitlines()
    facts = json.loads(line)

    assert facts.pop("moved inside"), "this vLLM sets no stream of its own"
    assert set(facts.values()) == {True}, facts


@pytest.mark.drill
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_experts_that_are_returned_on_a_device_are_those_of_transformers(
    simulated: Simulated, tmp_path: Path
) -> None:
    """In float32, of a cached prefix too; the experts reach the host while later steps run."""
    *_, line = simulated(PROGRAMS / "vllm_routes.py", tmp_path).splitlines()
    found = json.loads(line)

    assert found["most_own"] == found["least_own"] == 1  # the last token was never read
    assert found["equal"] == 1


def allocator_of(simulated: Simulated, folder: Path, *settings: str, ranks: int = 1) -> list[Any]:
    """What each rank's environment says to the allocator when the script begins."""
    start = ["-m", "spmdflow.run", "--inproc"]
    if ranks > 1:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        start += ["-m", "spmdflow.run"]
    model = ROOT / "algos" / "arithmetic"
    size = ("data.max_prompt_tokens=8", "actor.rollout.max_new_tokens=4", "total_steps=1")
    paths = (f"actor.model.path={model / 'model'}", f"data.train_path={model / 'train.jsonl'}")
    output = simulated(
        *(*start, PROGRAMS / "allocator.py", *size, *paths, "eval_every=0", *settings),
        f"run.dir={folder}",
    )
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"variables"')]
    run = found[-1]  # the one before it is of the plan
    assert run["torch"] == run["variables"].get(VARIABLE, "")
    return sorted(run["variables"].items())


VLLM = ("actor.rollout.engine=vllm", "actor.rollout.kv_cache_gib=0.1", "actor.rollout.weights=copy")
ON = [(VARIABLE, settings_for(torch.__version__, expandable=True))]
OFF = [(VARIABLE, settings_for(torch.__version__, expandable=False))]


def test_memory_grows_in_segments_with_the_builtin_generator(
    simulated: Simulated, tmp_path: Path
) -> None:
    assert allocator_of(simulated, tmp_path, "actor.rollout.engine=builtin") == ON


def test_setting_of_the_user_is_left_alone(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")

    found = allocator_of(simulated, tmp_path, "actor.rollout.engine=builtin")

    assert found == [("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize(
    ("tp_size", "expected"), [(1, ON), pytest.param(2, OFF, marks=pytest.mark.drill)]
)
def test_memory_grows_in_segments_with_vllm_on_single_ranks_only(
    simulated: Simulated, tmp_path: Path, tp_size: int, expected: list[tuple[str, str]]
) -> None:
    layout = f"actor.rollout.layout=t{tp_size}"

    assert allocator_of(simulated, tmp_path, *VLLM, layout, ranks=tp_size) == expected
