"""Exported adapters in peft: the same logits as the merged export; read back, the same values."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.export import MergedState, ModelExport
from spmdflow.checkpoint.state import StateFiles
from spmdflow.checkpoint.tensors import write_state
from spmdflow.config.adapter import take_adapter_settings
from spmdflow.config.model import LoRAConfig
from spmdflow.config.schema import ModelConfig
from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import shapes_by_name
from spmdflow.workers.lora import add_adapters
from spmdflow.workers.model import load_model
from spmdflow.workers.sharding import read_weights

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "plain": LoRAConfig(4, 8.0, LAYERS),
    "rslora": LoRAConfig(4, 8.0, ["q_proj", "down_proj"], rslora=True, dropout=0.1),
    "head": LoRAConfig(4, 8.0, LAYERS, modules_to_save=["lm_head", "model.norm"]),
    "tied": LoRAConfig(4, 8.0, LAYERS, modules_to_save=["embed_tokens"], rslora=True),
}


def write_model(folder: Path, *, tied: bool) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        tie_word_embeddings=tied,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def trained_values(folder: Path, lora: LoRAConfig) -> dict[str, Tensor]:
    """Random values of all that is trained."""
    config = json.loads((folder / "config.json").read_text())
    architecture = Architecture.from_config(config, head="causal_lm")
    shapes = shapes_by_name(architecture)
    every = dict(shapes) | lora.adapters.shapes(shapes)
    generator = torch.Generator().manual_seed(1)
    result = {}
    for name, shape in every.items():
        if lora.adapters.is_trained(name):
            result[name] = 0.1 * torch.randn(shape, generator=generator)
    return result


def export_both(folder: Path, model: Path, lora: LoRAConfig) -> dict[str, Tensor]:
    """Write folder/adapter and folder/merged; return the trained values."""
    values = trained_values(model, lora)
    config = json.loads((model / "config.json").read_text())
    facts = {"config": config, "dtype": "float32", "source": str(model), "lora": asdict(lora)}
    plain = {"shapes": {n: list(x.shape) for n, x in values.items()}, "model": facts}
    blocks = [(name, x, Box.of_shape(x.shape)) for name, x in values.items()]
    write_state(folder / "state" / "rank-0.safetensors", blocks, plain)
    state = StateFiles(folder / "state", unsealed=["rank-0.safetensors"])
    ModelExport(state.plain).write(state, folder / "adapter")
    merged = MergedState(state, model)
    ModelExport(merged.plain).write(merged, folder / "merged")
    return values


def logits_of(model: Any) -> Tensor:
    ids = torch.arange(24).view(2, 12) * 5 % 64
    with torch.no_grad():
        found: Tensor = model.eval()(ids).logits
    return found


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_peft_computes_with_the_exported_adapter_as_with_the_merged_model(
    case: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", tied=case == "tied")
    export_both(tmp_path, model, CASES[case])

    adapted = logits_of(peft.PeftModel.from_pretrained(load(model), tmp_path / "adapter"))
    merged = logits_of(load(tmp_path / "merged"))

    assert float((adapted - merged).abs().max()) < 1e-5  # float32 sums in another order
    assert float((adapted - logits_of(load(model))).abs().max()) > 0.1


@pytest.mark.parametrize("case", CASES)
def test_model_that_starts_from_an_adapter_has_its_values_and_settings(
    case: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", tied=case == "tied")
    values = export_both(tmp_path, model, CASES[case])
    lora = LoRAConfig(adapter=str(tmp_path / "adapter"))

    take_adapter_settings("actor.model.lora", lora, ())
    loaded = load_model(ModelConfig(path=str(model)), head="causal_lm")
    adapted = add_adapters(loaded, lora, seed=0, key="actor.model.lora")
    found = dict(read_weights(adapted, torch.device("cpu")).named_parameters())

    assert all(torch.equal(found[name], x) for name, x in values.items())
    start = dict(load(model).named_parameters())
    assert all(torch.equal(found[n], x) for n, x in start.items() if n not in values)
    expected = asdict(CASES[case])
    assert lora.scale == CASES[case].scale and lora.dropout == expected["dropout"]
    assert sorted(lora.targets) == sorted(expected["targets"])
    assert lora.modules_to_save == expected["modules_to_save"]


def test_adapter_that_peft_wrote_for_a_tied_embedding_is_read(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", tied=True)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )
    theirs: Any = peft.get_peft_model(load(model), config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.ones_like(parameter))
    theirs.save_pretrained(tmp_path / "adapter")
    lora = LoRAConfig(adapter=str(tmp_path / "adapter"))

    take_adapter_settings("actor.model.lora", lora, ())
    loaded = load_model(ModelConfig(path=str(model)), head="causal_lm")
    adapted = add_adapters(loaded, lora, seed=0, key="actor.model.lora")
    found = dict(read_weights(adapted, torch.device("cpu")).named_parameters())

    merged = theirs.merge_and_unload()
    assert torch.equal(found["model.embed_tokens.weight"], merged.lm_head.weight)


def test_embedding_that_is_not_the_head_is_refused_in_a_tied_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", tied=True)
    export_both(tmp_path, model, CASES["tied"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.weight"] += 1
    save_file(tensors, file)
    lora = LoRAConfig(adapter=str(tmp_path / "adapter"))
    take_adapter_settings("actor.model.lora", lora, ())
    loaded = load_model(ModelConfig(path=str(model)), head="causal_lm")

    with pytest.raises(ConfigError, match=r"lora\.adapter: got .* with an embedding that is not"):
        add_adapters(loaded, lora, seed=0, key="actor.model.lora")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("lm_head", "'lm_head', whose weight is that of the embedding, expected a module with"),
        ("nothing", "'nothing', expected some of down_proj, embed_tokens, gate_proj"),
    ],
)
def test_module_to_save_that_the_model_lacks_is_refused(
    module: str, words: str, tmp_path: Path
) -> None:
    model = load_model(ModelConfig(path=str(write_model(tmp_path, tied=True))), head="causal_lm")

    with pytest.raises(ConfigError, match=rf"lora\.modules_to_save: got {words}"):
        add_adapters(model, LoRAConfig(modules_to_save=[module]), seed=0, key="actor.model.lora")
