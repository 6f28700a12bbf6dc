"""An export has the tensors of the folder that a model came from, also where experts are fused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from scripts.families.tiny import FAMILIES, save_tiny_model
from spmdflow.weights.folder import folder_form, folder_tensors

BY_DEFAULT = ("qwen3_moe", "gpt_oss", "deepseek_v3", "phi3")
CASES = [
    pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAMILIES
]


@pytest.mark.parametrize("family", CASES)
def test_tensors_of_the_module_in_folder_form_are_those_of_the_folder(
    family: str, tmp_path: Path
) -> None:
    """Bitwise, by name; tied tensors once."""
    folder = save_tiny_model(family, tmp_path / family)
    expected = dict(folder_tensors(folder))
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = module.config.to_dict() | {"architectures": [type(module).__name__]}
    state = {}
    known = set()
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in known:
            known.add(tensor.data_ptr())
            state[name] = tensor

    form = folder_form(json.dumps(config))

    fused = {piece.name for table in form.values() for piece in table.pieces}
    found = {name: tensor for name, tensor in state.items() if name not in fused}
    for name, table in form.items():
        values = torch.full(table.shape, torch.nan)
        for piece in table.pieces:
            piece.view(values).copy_(state[piece.name][piece.box.slices()])
        found[name] = values
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def test_experts_are_cut_where_transformers_fuses_them(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3_moe", tmp_path)

    form = folder_form((folder / "config.json").read_text())

    assert len(form) == 2 * 8 * 3  # layers, experts, matrices
    gate = form["model.layers.1.mlp.experts.5.gate_proj.weight"]
    (piece,) = gate.pieces
    assert piece.name == "model.layers.1.mlp.experts.gate_up_proj"
    assert piece.box.bounds == ((5, 6), (0, 32), (0, 64))
