"""Architectures against transformers' own models, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture, RopeScaling
from spmdflow.weights.table import parameters, stage_layers
from tests.unit.weight_shapes import TINY, VARIANTS, architecture

BUNDLED = Path(__file__).parents[3] / "algos/arithmetic/model"


@pytest.mark.parametrize("head", ["causal_lm", "scalar"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_shapes_and_order_are_those_of_transformers(variant, head):
    import transformers

    config = transformers.AutoConfig.for_model(**{**TINY, **VARIANTS[variant]}, num_labels=1)
    auto = {
        "causal_lm": transformers.AutoModelForCausalLM,
        "scalar": transformers.AutoModelForSequenceClassification,
    }[head]
    with torch.device("meta"):
        model = auto.from_config(config)
    arch = Architecture.from_config(config.to_dict(), head=head)

    ours = {parameter.name: parameter.shape for parameter in parameters(arch)}
    theirs = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}

    assert ours == theirs
    assert arch == Architecture.from_config({**TINY, **VARIANTS[variant]}, head=head)
    assert arch.norm_eps == config.rms_norm_eps


def test_bundled_model_is_read_from_its_folder():
    arch = Architecture.from_folder(BUNDLED)

    assert (arch.family, arch.num_layers, arch.vocab_size, arch.tied) == ("llama", 2, 16, False)
    assert (arch.rope_theta, arch.rope_scaling, arch.max_positions) == (10000.0, None, 64)


def test_rope_reads_the_same_in_the_forms_of_transformers_4_and_5():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }

    old = architecture(rope_theta=5e5, rope_scaling=scaling)
    new = architecture(rope_parameters={"rope_theta": 5e5, **scaling})

    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))


def test_sliding_window_counts_for_mistral_and_is_idle_in_qwen2():
    assert architecture("mistral, one kv head", sliding_window=32).sliding_window == 32
    assert architecture("mistral, one kv head", sliding_window=None).sliding_window is None
    assert architecture("mistral, one kv head").sliding_window == 4096, "as transformers assumes"
    assert architecture("qwen2, two kv heads", sliding_window=32).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_moe"}, "got model_type 'qwen2_moe', expected one of llama"),
        ({"hidden_act": "gelu"}, "got hidden_act 'gelu'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "got use_sliding_window True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "got rope scaling 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "got partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "got quantization_config True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "got layer_types"),
        ({"num_key_value_heads": 3}, "got 3 key-value heads for 8 attention heads"),
        ({"hidden_size": None}, "got hidden_size None"),
        ({"head_dim": 5}, "got head_dim 5, expected an even number"),
    ],
)
def test_unsupported_model_is_refused_with_its_feature(changes, message):
    with pytest.raises(ConfigError, match=message):
        architecture(**changes)


def test_folder_without_config_is_refused_with_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: no config\.json in .*, expected"):
        Architecture.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "llama"}))

    assert Architecture.from_folder(tmp_path) == architecture()


@pytest.mark.parametrize("num_layers", range(1, 13))
def test_stages_partition_the_layers_and_nest_in_the_stages_of_divisors(num_layers):
    for pp_size in range(1, num_layers + 1):
        stages = [stage_layers(num_layers, pp_size=pp_size, pp_rank=r) for r in range(pp_size)]

        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1
        for fewer in (size for size in range(1, pp_size) if pp_size % size == 0):
            ratio = pp_size // fewer
            joined = stage_layers(num_layers, pp_size=fewer, pp_rank=0)
            assert list(joined) == [layer for stage in stages[:ratio] for layer in stage]


@pytest.mark.parametrize("head", ["causal_lm", "scalar"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_counted_as_the_table_lists_them(variant, head):
    arch = architecture(variant, head=head)

    assert arch.num_parameters == sum(math.prod(part.shape) for part in parameters(arch))


def test_family_beyond_the_tables_has_sizes_and_no_table(tmp_path):
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(gpt2 | {"n_positions": 1024}))

    arch = Architecture.sizes_from_folder(tmp_path)

    assert (arch.num_layers, arch.hidden_size, arch.ffn_size) == (12, 768, 3072)
    assert (arch.num_kv_heads, arch.head_dim, arch.max_positions) == (12, 64, 1024)
    assert arch.tied and not arch.gated
    assert "got model_type 'gpt2', expected one of llama" in arch.obstacle
    with pytest.raises(ConfigError, match="got model_type 'gpt2'"):
        Architecture.from_folder(tmp_path)
    with pytest.raises(AssertionError, match="got model_type 'gpt2'"):
        parameters(arch)


def test_size_that_a_family_beyond_the_tables_does_not_state_is_0():
    assert Architecture.sizes_from_config({"model_type": "mamba", "vocab_size": 8}).num_heads == 0


def test_sizes_of_a_model_in_parts_are_its_texts():
    found = Architecture.sizes_from_config({"model_type": "llava", "text_config": TINY})

    assert found.num_heads == TINY["num_attention_heads"] and found.obstacle
