"""Rows of many families, packed and padded, beside each row alone in plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tensordict import TensorDict
from torch import Tensor

from scripts.families.tiny import FAMILIES, save_tiny_model
from spmdflow.config.schema import ModelConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.weights.architecture import PACKED_BY_TRANSFORMERS, Architecture
from spmdflow.weights.folder import attention_of
from spmdflow.workers.micro_batch import micro_batches
from spmdflow.workers.model import load_model
from spmdflow.workers.sharding import read_weights
from tests.random_tokens import random_tokens

CPU = torch.device("cpu")
BY_DEFAULT = ("gemma2", "gpt_oss", "deepseek_v3", "qwen3_next")
CASES = [
    pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAMILIES
]


PROMPTS = random_tokens(5, 17, 1, 3)
RESPONSES = random_tokens(14, 3, 9, 14)


def log_probs_by_transformers(folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of each row's response tokens, the row alone, and their sum's gradients."""
    config = transformers.AutoConfig.from_pretrained(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **attention_of(config)
    ).eval()
    parts = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = plain(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits
        chosen = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(-1, response[:, None])
        parts.append(chosen[:, 0])
    torch.cat(parts).sum().backward()
    gradients = {}
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return [part.detach() for part in parts], gradients


@pytest.mark.parametrize("family", CASES)
def test_log_probs_and_gradients_are_those_of_each_row_alone(family: str, tmp_path: Path) -> None:
    """Log-probs within 1e-5, gradients within 5e-6 of their norm; packed too where rows pack."""
    folder = save_tiny_model(family, tmp_path / family)
    expected, gradients = log_probs_by_transformers(folder)
    rows = {"prompts": ragged_from_rows(PROMPTS), "responses": ragged_from_rows(RESPONSES)}
    ways = [False]
    if Architecture.sizes_from_folder(folder).packs:
        ways.append(True)
    for packed in ways:
        module = read_weights(load_model(ModelConfig(path=str(folder)), head="causal_lm"), CPU)
        (micro,) = micro_batches(
            TensorDict(rows, batch_size=[len(PROMPTS)]),
            num_micro_batches=1,
            by_tokens=False,
            device=CPU,
            packed=packed,
        )

        found = module(micro, lambda output, _: output.log_probs())
        found.sum().backward()

        in_order = torch.cat([expected[row] for row in micro.index])
        assert float((found - in_order).abs().max()) < 1e-5, packed
        ours = dict(module.named_parameters())
        gap = 0.0
        norm = 0.0
        for name, gradient in gradients.items():
            gap += float((ours[name].grad - gradient).square().sum())
            norm += float(gradient.square().sum())
        assert (gap / norm) ** 0.5 < 5e-6, packed


def test_no_family_is_packed_without_a_case_here() -> None:
    assert PACKED_BY_TRANSFORMERS <= FAMILIES.keys()
