"""Boxes out of Hugging Face folders, and folders written from tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.export import ModelExport, plan_files
from spmdflow.checkpoint.state import StateFiles
from spmdflow.checkpoint.tensors import write_state
from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import HuggingFaceFolder, folder_tensors
from spmdflow.weights.move import blocks, fill
from spmdflow.weights.ranks import megatron_shards
from spmdflow.weights.table import parameters
from tests.unit.weight_shapes import TINY, VARIANTS, architecture, empty_of, gathered, values_of

BUNDLED = Path(__file__).parents[3] / "algos/arithmetic/model"


def _write(folder, variant="llama", max_file_bytes=1 << 30):
    source = folder / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("old weights")
    values = values_of(architecture(variant))
    written = folder / "written"
    config = {**TINY, **VARIANTS[variant], "architectures": ["LlamaForCausalLM"]}
    blocks = [(name, each, Box.of_shape(each.shape)) for name, each in values.items()]
    shapes = {name: list(each.shape) for name, each in values.items()}
    model = {"config": config, "dtype": "float64", "source": str(source)}
    plain = {"shapes": shapes, "model": model}
    write_state(folder / "rank-0.safetensors", blocks, plain)
    with mock.patch.dict(plan_files.__kwdefaults__, most_bytes=max_file_bytes):
        export = ModelExport(plain)
    export.write(StateFiles(folder, unsealed=["rank-0.safetensors"]), written)
    return written, values


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 20_000])
def test_every_megatron_rank_reads_its_boxes_from_one_file_or_several(tmp_path, max_file_bytes):
    folder, values = _write(tmp_path, max_file_bytes=max_file_bytes)
    arch = Architecture.from_folder(folder)
    reader = HuggingFaceFolder(folder, arch)
    parts = []
    for tp_rank in range(2):
        for pp_rank in range(2):
            table = megatron_shards(
                arch, tp_size=2, tp_rank=tp_rank, pp_size=2, pp_rank=pp_rank, vocab_multiple=64
            )
            local = empty_of(table)
            fill(local, table, reader.read)
            parts += blocks(local, table)

    again = dict(gathered(parts, {name: tuple(values[name].shape) for name in values}))

    assert all(torch.equal(again[name], values[name]) for name in values)
    assert {name for name, _ in folder_tensors(folder)} == set(values)
    sizes = [len(load_file(path)) for path in folder.glob("*.safetensors")]
    assert sum(sizes) == len(values)
    assert (len(sizes) == 1) == (max_file_bytes > 20_000)


def test_written_folder_loads_in_transformers_and_has_the_sources_other_files(tmp_path):
    import transformers

    folder, values = _write(tmp_path, "qwen3, tied", max_file_bytes=60_000)

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )

    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = dict(model.named_parameters())
    assert all(torch.equal(state[name], values[name]) for name in values)
    assert sorted(path.name for path in folder.iterdir() if "model" not in path.name) == [
        "config.json",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors.index.json").is_file()


def test_bundled_model_reads_as_its_file_says():
    arch = Architecture.from_folder(BUNDLED)
    reader = HuggingFaceFolder(BUNDLED, arch)
    whole = load_file(BUNDLED / "model.safetensors")

    for part in parameters(arch):
        box = Box(tuple((size // 3, size) for size in part.shape))
        assert torch.equal(reader.read(part.name, box), whole[part.name][box.slices()])
    assert sum(math.prod(part.shape) for part in parameters(arch)) == sum(
        tensor.numel() for tensor in whole.values()
    )


def test_fresh_critic_reads_a_zero_head_from_a_causal_model(tmp_path):
    folder, _ = _write(tmp_path, "llama, tied")
    arch = Architecture.from_folder(folder, head="scalar")

    head = HuggingFaceFolder(folder, arch, new_head=True).read(
        "score.weight", Box(((0, 1), (4, 16)))
    )

    assert head.dtype == torch.float64
    assert torch.equal(head, torch.zeros(1, 12).double())
    with pytest.raises(ConfigError, match=r"without 1 tensor \(score.weight\)"):
        HuggingFaceFolder(folder, arch)


def test_folder_of_another_model_is_refused_with_the_tensor(tmp_path):
    folder, values = _write(tmp_path, "llama, tied")
    arch = Architecture.from_folder(folder)

    with pytest.raises(ConfigError, match=r"without 1 tensor \(lm_head.weight\)"):
        HuggingFaceFolder(folder, architecture("llama"))
    with pytest.raises(ConfigError, match=r"of shape \(100, 16\) in .*, expected \(101, 16\)"):
        HuggingFaceFolder(folder, architecture("llama, tied", vocab_size=101))
    (folder / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="does not read as safetensors"):
        HuggingFaceFolder(folder, arch)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor model.safetensors.index"):
        HuggingFaceFolder(folder, arch)


def test_index_that_names_a_missing_file_is_refused_with_the_file(tmp_path):
    values = {name: tensor.contiguous() for name, tensor in values_of(architecture()).items()}
    save_file(values, tmp_path / "elsewhere.safetensors")
    index = {"weight_map": dict.fromkeys(values, "gone.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(
        ConfigError, match="without gone.safetensors, which model.safetensors.index.json names"
    ):
        HuggingFaceFolder(tmp_path, architecture())
