"""Sizes of mixtures of experts, read off their config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.families.tiny import save_tiny_model
from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import causal_lm_on_meta
from spmdflow.weights.table import parameters

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
LARGER = {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64}
QWEN3_235B = QWEN3_30B | LARGER | {"moe_intermediate_size": 1536, "intermediate_size": 12288}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "billions"), [(QWEN3_30B, 30.53), (QWEN3_235B, 235.1), (GPT_OSS_20B, 20.91)]
)
def test_number_of_weights_is_the_published_one(config: dict[str, Any], billions: float) -> None:
    architecture = Architecture.sizes_from_config(config)

    assert architecture.num_parameters / 1e9 == pytest.approx(billions, rel=5e-4)


def test_a_token_uses_a_tenth_of_the_weights_of_qwen3_30b() -> None:
    architecture = Architecture.sizes_from_config(QWEN3_30B)

    assert architecture.num_experts == 128
    assert architecture.activated_size == 8 * 768


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe", "dots1"])
def test_weights_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Within 0.5 %: norms of heads, gates of shared experts and biases are not counted."""
    folder = save_tiny_model(family, tmp_path)
    count = sum(parameter.numel() for parameter in causal_lm_on_meta(folder).parameters())

    found = Architecture.sizes_from_folder(folder).num_parameters

    assert found == pytest.approx(count, rel=5e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_tensors_of_a_table_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path)

    described = [(name, shape) for name, shape in parameters(Architecture.from_folder(folder))]

    module = causal_lm_on_meta(folder)
    found = [(name, tuple(tensor.shape)) for name, tensor in module.named_parameters()]
    assert sorted(described) == sorted(found)


def test_experts_in_some_layers_only_have_no_table() -> None:
    with pytest.raises(ConfigError, match="got experts in 24 of 48 layers of a qwen3_moe config"):
        Architecture.from_config(QWEN3_30B | {"decoder_sparse_step": 2})
