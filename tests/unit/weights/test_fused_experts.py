"""Experts that transformers fuses when it loads a folder, read box by box from its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from scripts.families.tiny import FAMILIES, save_tiny_model
from spmdflow.blocks.box import Box
from spmdflow.weights.folder import empty_module, folder_of

FUSED = ("deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "minimax_m2", "mixtral", "olmoe")
FUSED += ("qwen2_moe", "qwen3_moe", "qwen3_next")
BY_DEFAULT = ("deepseek_v3", "mixtral", "qwen3_moe")
CASES = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FUSED]


@pytest.mark.parametrize("family", CASES)
def test_boxes_of_fused_tensors_are_those_that_transformers_loads(
    family: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(family, tmp_path / family)
    module = empty_module(transformers.AutoModelForCausalLM, folder, torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    reader = folder_of(module, folder)

    assert reader is not None
    fused = [name for name in dict(loaded.named_parameters()) if name not in reader.names]
    assert any("experts" in name for name in fused)
    for name, expected in loaded.named_parameters():
        whole = Box.of_shape(expected.shape)
        assert torch.equal(reader.read(name, whole), expected), name
        if ".experts." not in name:
            continue
        experts, rows, columns = expected.shape
        before = reader.bytes_read
        inner = Box(((1, experts - 1), (rows // 4, rows // 2 + 3), (2, columns)))
        assert torch.equal(reader.read(name, inner), expected[inner.slices()]), name
        assert reader.bytes_read - before == 4 * inner.size  # no more than the box


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_family_is_loaded_whole(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path / family)
    module = empty_module(transformers.AutoModelForCausalLM, folder, torch.float32)

    assert folder_of(module, folder) is not None
