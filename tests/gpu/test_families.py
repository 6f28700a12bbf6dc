"""Families of transformers on one GPU: gradients, replayed routes, and generation with vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scripts.families.run import SIZES_FOR_VLLM
from scripts.families.tiny import FAMILIES, save_tiny_model
from tests.distributed.ranks import run_ranks
from tests.gpu.families import gradients
from tests.gpu.test_hybrid_engine import MEGATRON, check, need

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
NUM_PARTS = 4
"""FAMILIES are tested in so many processes, each of which starts CUDA once."""
GRADIENT = {"float32": 2e-5, "bfloat16": 0.05}
"""Largest distance of the gradient from that of transformers, over the norm of the latter."""
GRADIENT_OF_MIXTURE = {"float32": 2e-5, "bfloat16": 0.3}
"""Rounding makes routers choose other experts for some tokens."""
REPLAY = {"float32": 2e-5, "bfloat16": 0.3}
"""Largest gap of a log-prob with random routes."""
DENSE_OF_MEGATRON = ("llama", "qwen2", "qwen3")
MIXTURES_OF_MEGATRON = ("qwen3_moe", "mixtral")
BUILTIN = ("qwen3_moe", "gpt_oss", "gemma2", "gemma3_text", "deepseek_v3", "qwen3_5_text")
VLLM = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "gemma3_text", "phi3", "glm4", "granitemoe")


def check_gaps(found: dict[str, dict[str, Any]], dtype: str) -> None:
    assert not [gaps["error"] for gaps in found.values() if "error" in gaps]
    measured = {family: gaps for family, gaps in found.items() if "unknown" not in gaps}
    assert len(measured) > len(found) / 2
    for family, gaps in measured.items():
        allowed = GRADIENT_OF_MIXTURE if gaps["auxiliary"] else GRADIENT
        assert gaps["gradient"] < allowed[dtype], (family, gaps)
        assert gaps["replay"] < REPLAY[dtype], (family, gaps)


def keep(found: dict[str, dict[str, Any]], name: str) -> None:
    """Write what was measured to a file of $LOGS, where that is set (scripts/gpu_night.sh)."""
    if "LOGS" in os.environ:
        (Path(os.environ["LOGS"]) / f"{name}.json").write_text(json.dumps(found, indent=1))


@pytest.mark.parametrize("dtype", GRADIENT)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_gradients_of_families_are_those_of_transformers(
    tmp_path: Path, part: int, dtype: str
) -> None:
    families = list(FAMILIES)[part::NUM_PARTS]

    (found,) = run_ranks(gradients, 1, "cuda", tmp_path, "fsdp", dtype, families)

    keep(found, f"fsdp-{part}-{dtype}")
    check_gaps(found, dtype)


@pytest.mark.parametrize("dtype", GRADIENT)
def test_gradients_of_megatron_are_those_of_transformers(tmp_path: Path, dtype: str) -> None:
    need(MEGATRON | {"rollout.engine": "builtin"})
    families = [*DENSE_OF_MEGATRON, *MIXTURES_OF_MEGATRON]

    (found,) = run_ranks(gradients, 1, "cuda", tmp_path, "megatron", dtype, families)

    keep(found, f"megatron-{dtype}")
    check_gaps(found, dtype)


@pytest.mark.parametrize("family", BUILTIN)
def test_built_in_generation_of_a_family_follows_the_trainer(tmp_path: Path, family: str) -> None:
    path = str(save_tiny_model(family, tmp_path / "model"))

    check(path, {}, dtype="float32", num_devices=1)


@pytest.mark.parametrize("family", VLLM)
def test_generation_of_a_family_with_vllm_follows_the_trainer(tmp_path: Path, family: str) -> None:
    need({"rollout.engine": "vllm"})
    path = str(save_tiny_model(family, tmp_path / "model", sizes=SIZES_FOR_VLLM))

    check(path, {"rollout.engine": "vllm"}, dtype="float32", num_devices=1)


@pytest.mark.parametrize("family", MIXTURES_OF_MEGATRON)
def test_generation_of_a_mixture_with_vllm_follows_megatron(tmp_path: Path, family: str) -> None:
    need(MEGATRON)
    path = str(save_tiny_model(family, tmp_path / "model", sizes=SIZES_FOR_VLLM))

    check(path, {**MEGATRON, "rollout.weights": "copy"}, dtype="float32", num_devices=1)
