"""What a generator without a trainer reads: the tensors that a policy of its model would send."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from scripts.families.tiny import save_tiny_model
from spmdflow.blocks.box import Box
from spmdflow.serving.mirror import trained_shapes
from spmdflow.weights.folder import trained_tensors_reader


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_a_folder_gives_the_tensors_of_transformers_under_the_names_of_a_sync(
    family: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(family, tmp_path / family)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = dict(model.named_parameters())

    read = trained_tensors_reader(folder)
    shapes = trained_shapes(str(folder))

    assert shapes.keys() == expected.keys()
    for name, shape in shapes.items():
        assert torch.equal(read(name, Box.of_shape(shape)), expected[name]), name
        lower_half = Box.of_shape(shape).cut(0, shape[0] // 2)[1]
        assert torch.equal(read(name, lower_half), expected[name][shape[0] // 2 :]), name
