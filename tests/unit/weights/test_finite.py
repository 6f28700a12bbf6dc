"""Weights that are no numbers are refused by tensor and file when they are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdflow.blocks.box import Box
from spmdflow.config.schema import ModelConfig
from spmdflow.errors import ConfigError
from spmdflow.weights.folder import HuggingFaceFolder
from spmdflow.workers.model import load_model

MODEL = Path(__file__).parents[3] / "algos" / "arithmetic" / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_no_number_is_named_with_its_file(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    name = sorted(tensors)[3]
    tensors[name].view(-1)[1] = value
    save_file(tensors, file, {"format": "pt"})
    folder = HuggingFaceFolder(tmp_path / "model", {})

    for other in sorted(tensors)[:3]:
        folder.read(other, Box.of_shape(tensors[other].shape))
    with pytest.raises(ConfigError) as caught:
        folder.read(name, Box.of_shape(tensors[name].shape))

    assert f"got 1 of {tensors[name].numel()} numbers nan or infinite in {name} of {file}" in str(
        caught.value
    )


def test_weight_of_a_model_that_transformers_loads_whole_is_named_with_its_folder(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[name := "model.norm.weight"][3] = float("nan")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    with pytest.raises(ConfigError, match=rf"got 1 of \d+ numbers nan or inf.* {name} of {folder}"):
        load_model(ModelConfig(path=str(folder)), head="causal_lm")


def test_large_numbers_and_no_numbers_at_all_are_read(tmp_path: Path) -> None:
    tensors = {"w": torch.full((8,), 3e38), "none": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = HuggingFaceFolder(tmp_path, {})

    assert folder.read("w", Box.of_shape((8,))).isfinite().all()
    assert folder.read("none", Box.of_shape((0, 3))).shape == (0, 3)
