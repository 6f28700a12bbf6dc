"""Runs within 1 % of the memory that their plans say, on devices that refuse more."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.simcuda.conftest import ROOT, Simulated, planned_peak

pytestmark = pytest.mark.drill

BUNDLED = ROOT / "algos" / "arithmetic" / "model"
ROLES = ("actor", "critic", "reference")
VLLM = (
    "actor.rollout.engine=vllm",
    "actor.rollout.kv_cache_gib=0.5",
    "critic.engine.offload=[parameters,gradients,optimizer]",
)
"""A large cache, and a model that is on the device with all of its parts only while it is built."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 18 M parameters, whose parts outweigh what a plan does not count."""
    folder = tmp_path_factory.mktemp("planned") / "model"
    config = AutoConfig.from_pretrained(BUNDLED)
    config.hidden_size = 512
    config.intermediate_size = 1408
    config.num_hidden_layers = 6
    config.num_attention_heads = 8
    config.num_key_value_heads = 4
    config.head_dim = 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in BUNDLED.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def settings_of(model: Path, *more: str) -> list[str]:
    """PPO for two steps with nothing left to choose."""
    settings = [
        f"actor.model.path={model}",
        "actor.rollout.engine=builtin",
        "actor.rollout.weights=copy",
        "actor.rollout.dtype=float32",
        "data.prompts_per_step=32",
        "actor.update.mini_batch_size=32",
        "critic.update.mini_batch_size=32",
        "eval_every=0",
        "save_every=0",
        "run.save_last=false",
        "run.sample_every=0",
        "total_steps=2",
    ]
    for role in ROLES:
        settings += [
            f"{role}.model.dtype=float32",
            f"{role}.engine.micro_batch_rows=null",
            f"{role}.engine.micro_batch_tokens=256",
            f"{role}.engine.offload=[]",
        ]
    return [*settings, *more]


def run(simulated: Simulated, folder: Path, settings: list[str]) -> None:
    """Train on one simulated device."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    simulated(*launcher, "-m", "spmdflow.run", "ppo", *settings, f"run.dir={folder}")


@pytest.mark.parametrize("more", [(), VLLM], ids=["builtin", "vllm"])
def test_run_fits_into_one_percent_more_memory_than_planned(
    simulated: Simulated,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
) -> None:
    if more and find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    settings = settings_of(model, *more)
    monkeypatch.setenv(
        "SIMCUDA_MEMORY", str(int(1.01 * planned_peak("ppo", settings, num_ranks=1)))
    )

    run(simulated, tmp_path / "run", settings)

    assert (tmp_path / "run" / "finished").read_text() == "step 2\n"


def test_run_ends_with_too_little_memory(
    simulated: Simulated, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(model)
    planned = planned_peak("ppo", settings, num_ranks=1)
    monkeypatch.setenv("SIMCUDA_MEMORY", str(int(0.8 * planned)))

    with pytest.raises(AssertionError, match="CUDA out of memory"):
        run(simulated, tmp_path / "run", settings)
