"""transformers modules without weights, and their weights read box by box."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdflow.config.schema import ModelConfig
from spmdflow.errors import ConfigError
from spmdflow.workers.model import load_model
from spmdflow.workers.sharding import read_weights
from tests.outputs import micro_of

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": ("Llama", SIZES),
    "llama, stretched": ("Llama", SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", SIZES | {"head_dim": 16, "sliding_window": 4}),
    "qwen2, tied": ("Qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 12}),
    "gemma2, tied": ("Gemma2", SIZES | {"head_dim": 8}),
    "gpt2, tied": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}),
    "phi3": ("Phi3", SIZES | {"pad_token_id": 0}),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in SIZES.items() if "key_value" not in k}),
}


def _written(folder, name, sizes, *, seed=0):
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")
    model(getattr(transformers, f"{name}Config")(**sizes)).save_pretrained(folder)
    return folder


def _whole(folder, head):
    """What transformers loads by itself."""
    import transformers

    if head == "causal_lm":
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32, num_labels=1).eval()
    torch.nn.init.zeros_(model.score.weight)
    return model


def _assert_equal(model, expected):
    found = read_weights(model, CPU)
    for tensors in ("named_parameters", "named_buffers"):
        mine = dict(getattr(found, tensors)())
        theirs = dict(getattr(expected, tensors)())
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    return found


@pytest.mark.parametrize("head", ["causal_lm", "critic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_read_by_boxes_are_those_that_transformers_loads(tmp_path, family, head):
    folder = _written(tmp_path, *FAMILIES[family])

    model = load_model(ModelConfig(path=str(folder)), head=head)

    assert model.read is not None
    assert all(parameter.is_meta for parameter in model.module.parameters())
    expected = _whole(folder, head)
    found = _assert_equal(model, expected)
    if head == "causal_lm":
        ids = torch.arange(10)
        output = found(micro_of(ids), lambda output, _: output)
        assert (output.weight is None) == ("gemma2" in family)  # its logits are capped
        logits = output.hidden
        if output.weight is not None:
            logits = output.hidden @ expected.get_output_embeddings().weight.T
        torch.testing.assert_close(logits, expected(ids[None]).logits[0, :-1], rtol=1e-6, atol=1e-6)


def test_bfloat16_files_are_read_in_their_precision_and_counted(tmp_path):
    import transformers

    folder = _written(tmp_path, *FAMILIES["qwen2, tied"])
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "bfloat16"
    )

    model = load_model(ModelConfig(path=str(tmp_path / "bfloat16")), head="causal_lm")
    _assert_equal(model, _whole(tmp_path / "bfloat16", "causal_lm"))

    files = load_file(tmp_path / "bfloat16/model.safetensors")
    assert model.read.__self__.bytes_read == sum(tensor.nbytes for tensor in files.values())


def test_tensors_of_the_base_model_are_found_by_their_shorter_names(tmp_path):
    folder = _written(tmp_path, *FAMILIES["gpt2, tied"])
    files = load_file(folder / "model.safetensors")
    shorter = {name.removeprefix("transformer."): tensor for name, tensor in files.items()}
    save_file(shorter, folder / "model.safetensors", metadata={"format": "pt"})

    model = load_model(ModelConfig(path=str(folder)), head="causal_lm")

    assert model.read is not None
    _assert_equal(model, _whole(folder, "causal_lm"))


def test_a_tied_model_with_two_embeddings_is_loaded_whole(tmp_path, caplog):
    folder = _written(tmp_path / "tied", *FAMILIES["qwen2, tied"])
    files = load_file(folder / "model.safetensors")
    files["lm_head.weight"] = torch.zeros(64, 32)
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})

    with caplog.at_level(logging.WARNING):
        model = load_model(ModelConfig(path=str(folder)), head="causal_lm")

    assert model.read is None
    assert "are tied, but two tensors in the files" in caplog.messages[-1]
    _assert_equal(model, _whole(folder, "causal_lm"))


def test_missing_and_misshapen_tensors_are_refused_before_anything_is_read(tmp_path):
    folder = _written(tmp_path, *FAMILIES["llama"])
    config = ModelConfig(path=str(folder))

    with pytest.raises(ConfigError, match=r"without 1 tensor \(score.weight\)"):
        load_model(config, head="scalar")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 65}))
    with pytest.raises(ConfigError, match=r"shape \(64, 32\) in .*, expected \(65, 32\)"):
        load_model(config, head="causal_lm")
