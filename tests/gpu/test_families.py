"""Families of transformers on one GPU: gradients, replayed routes, and generation with vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.families.run import VLLM_SIZES
from scripts.families.tiny import FAMILIES, save_tiny_model
from tests.distributed.ranks import run_ranks
from tests.gpu.families import gradients
from tests.gpu.test_hybrid_engine import MEGATRON, check, need

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
NUM_PARTS = 4
"""FAMILIES are tested in so many processes, each of which starts CUDA once."""
GRADIENT = {"float32": 2e-5, "bfloat16": 0.1}
"""Largest distance of the gradient from that of transformers, over the norm of the latter."""
REPLAY = {"float32": 2e-5, "bfloat16": 0.3}
"""Largest gap of a log-prob with random routes."""
DENSE_OF_MEGATRON = ("llama", "qwen2", "qwen3")
MIXTURES_OF_MEGATRON = ("qwen3_moe", "mixtral")
BUILTIN = ("qwen3_moe", "gpt_oss", "gemma2", "gemma3_text", "deepseek_v3", "qwen3_5_text")
VLLM = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "gemma3_text", "phi3", "glm4", "granitemoe")


def check_gaps(found: dict[str, dict[str, Any]], dtype: str) -> None:
    assert not [gaps["error"] for gaps in found.values() if "error" in gaps]
    for family, gaps in found.items():
        assert gaps["gradient"] < GRADIENT[dtype], (family, gaps)
        assert gaps["replay"] < REPLAY[dtype], (family, gaps)


@pytest.mark.parametrize("dtype", GRADIENT)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_gradients_of_families_are_those_of_transformers(
    tmp_path: Path, part: int, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    families = list(FAMILIES)[part::NUM_PARTS]

    (found,) = run_ranks(gradients, 1, "cuda", tmp_path, "fsdp", dtype, families)

    show(found, f"fsdp, {dtype}", capsys)
    check_gaps(found, dtype)


@pytest.mark.parametrize("dtype", GRADIENT)
def test_gradients_of_megatron_are_those_of_transformers(
    tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    need(MEGATRON | {"rollout.engine": "builtin"})
    families = [*DENSE_OF_MEGATRON, *MIXTURES_OF_MEGATRON]

    (found,) = run_ranks(gradients, 1, "cuda", tmp_path, "megatron", dtype, families)

    show(found, f"megatron, {dtype}", capsys)
    check_gaps(found, dtype)


def show(found: dict[str, dict[str, Any]], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each family."""
    with capsys.disabled():
        for family, gaps in found.items():
            if "error" in gaps:
                numbers = gaps["error"].splitlines()[-1]
            else:
                numbers = ", ".join(f"{key} {value:.2g}" for key, value in gaps.items())
            print(f"\n{name} | {family} | {numbers}", end="")


@pytest.mark.parametrize("family", BUILTIN)
def test_built_in_generation_of_a_family_follows_the_trainer(tmp_path: Path, family: str) -> None:
    path = str(save_tiny_model(family, tmp_path / "model"))

    check(path, {}, dtype="float32", num_devices=1)


@pytest.mark.parametrize("family", VLLM)
def test_generation_of_a_family_with_vllm_follows_the_trainer(tmp_path: Path, family: str) -> None:
    need({"rollout.engine": "vllm"})
    path = str(save_tiny_model(family, tmp_path / "model", sizes=VLLM_SIZES))

    check(path, {"rollout.engine": "vllm"}, dtype="float32", num_devices=1)


@pytest.mark.parametrize("family", MIXTURES_OF_MEGATRON)
def test_generation_of_a_mixture_with_vllm_follows_megatron(tmp_path: Path, family: str) -> None:
    need(MEGATRON)
    path = str(save_tiny_model(family, tmp_path / "model", sizes=VLLM_SIZES))

    check(path, {**MEGATRON, "rollout.weights": "copy"}, dtype="float32", num_devices=1)
