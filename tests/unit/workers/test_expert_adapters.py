"""Adapters of a mixture: attention gets them, experts are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.families.tiny import save_tiny_model
from spmdflow.config.model import LoRAConfig
from spmdflow.config.schema import ModelConfig
from spmdflow.errors import ConfigError
from spmdflow.workers.lora import add_adapters
from spmdflow.workers.model import load_model


@pytest.mark.parametrize("target", ["down_proj", "experts"])
def test_experts_take_no_adapters(target: str, tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3_moe", tmp_path)
    model = load_model(ModelConfig(path=str(folder)), head="causal_lm")

    with pytest.raises(ConfigError, match=f"got '{target}', which is a tensor of experts and"):
        add_adapters(model, LoRAConfig(targets=[target]), seed=0, key="actor.model.lora")


def test_all_linear_means_the_linear_layers_without_the_experts(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3_moe", tmp_path)
    model = load_model(ModelConfig(path=str(folder)), head="causal_lm")

    adapted = add_adapters(model, LoRAConfig(targets=["all-linear"]), seed=0, key="key")

    names = {name for name, _ in adapted.module.named_parameters() if "lora_A" in name}
    assert {name.split(".")[-3] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
