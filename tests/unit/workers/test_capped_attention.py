"""Gemma 2, whose attention scores are capped, beside transformers' eager attention in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import ModelConfig, RolloutConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import take_folder_weights
from spmdflow.rollout.sampling import Sampling
from spmdflow.workers.micro_batch import micro_batches
from spmdflow.workers.model import load_model
from spmdflow.workers.sharding import read_weights

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 12], [30, 31, 32, 33, 34, 35, 36], [50]]
RESPONSES = [[7, 8, 9, 10, 11, 12], [40, 41], [60, 61, 62, 63, 64]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose scores are well above the cap; a window in every second layer."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=1,
        sliding_window=4,
        attn_logit_softcapping=1.0,
        max_position_embeddings=64,
        eos_token_id=1,
    )
    model = transformers.Gemma2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    made = tmp_path_factory.mktemp("models") / "gemma2"
    model.save_pretrained(made)
    return made


def plain(folder: Path, **config: Any) -> torch.nn.Module:
    """The module of transformers in float64, with eager attention, which caps the scores."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", **config
    ).eval()


def log_probs_of(model: torch.nn.Module, prompt: list[int], response: list[int]) -> Tensor:
    """Of each response token, by a forward over the one row."""
    ids = torch.tensor([prompt + response])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def test_trained_model_has_the_log_probs_and_gradients_of_eager_attention(folder: Path) -> None:
    loaded = load_model(ModelConfig(path=str(folder)), head="causal_lm")
    module = read_weights(loaded, CPU)
    columns = {"prompts": PROMPTS, "responses": RESPONSES}
    rows = {name: ragged_from_rows([torch.tensor(x) for x in xs]) for name, xs in columns.items()}
    (micro,) = micro_batches(
        TensorDict(rows, batch_size=[3]),
        num_micro_batches=1,
        by_tokens=False,
        device=CPU,
        packed=False,
    )

    found = module(micro, lambda output, _: output.log_probs())
    found.sum().backward()

    eager = plain(folder)
    pairs = list(zip(PROMPTS, RESPONSES, strict=True))
    expected = torch.cat([log_probs_of(eager, *pair) for pair in pairs])
    expected.sum().backward()
    assert torch.allclose(found.double(), expected, rtol=0, atol=1e-5)
    for name, parameter in eager.named_parameters():
        ours = module.get_parameter(name).grad.double()
        assert float((ours - parameter.grad).norm() / parameter.grad.norm()) < 1e-4, name
    uncapped = plain(folder, attn_logit_softcapping=None)
    with torch.no_grad():
        other = torch.cat([log_probs_of(uncapped, *pair) for pair in pairs])
    assert float((other - expected.detach()).abs().max()) > 1e-2  # the cap matters here


def test_generator_records_the_log_probs_of_eager_attention(folder: Path) -> None:
    generator = BuiltinGenerator(RolloutConfig(), str(folder), CPU)
    take_folder_weights(generator, str(folder), verify=True)
    prompts = ragged_from_rows([torch.tensor(prompt) for prompt in PROMPTS])

    made = generator.generate(prompts, Sampling(9), [1, 2, 3])

    eager = plain(folder)
    drawn = zip(rows_of(made["responses"]), rows_of(made["rollout_log_probs"]), strict=True)
    with torch.no_grad():
        for prompt, (tokens, log_probs) in zip(PROMPTS, drawn, strict=True):
            expected = log_probs_of(eager, prompt, tokens.tolist())
            assert torch.allclose(log_probs.double(), expected, rtol=0, atol=1e-5)
