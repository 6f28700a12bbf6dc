"""Plain single-process reference for the FSDP engine: Hugging Face, one row at a time, no padding.

Written from the formulas, without the engine's micro-batches, objectives or optimizer.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tensordict import TensorDict
from torch import Tensor, nn

from spmdflow.data.ragged import ragged, rows_of

CLIP = 0.2
ENTROPY = 0.01
KL = 0.05
VALUE_CLIP = 0.2
TEMPERATURE = 0.8


@dataclass
class Reference:
    """Loss, gradient and weights after one AdamW step."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def write_models(folder: Path) -> None:
    """Tiny random Llama folders: tied, untied, and a reward model."""
    size: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 2,
        "initializer_range": 0.1,
    }
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        ("tied", transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
        ("untied", transformers.LlamaForCausalLM, {"tie_word_embeddings": False}),
        ("reward", transformers.LlamaForSequenceClassification, {"num_labels": 1}),
    ]
    for seed, (name, cls, extra) in enumerate(kinds):
        torch.manual_seed(seed)
        cls(transformers.LlamaConfig(**size, **extra)).save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")


def make_batch(num_rows: int, *, seed: int = 0) -> TensorDict:
    """Random rows with holes in the response mask; prompts of 1-6 and responses of 1-7 tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + num_rows)

    def draw(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    prompt_lengths = draw(1, 7, num_rows)
    lengths = draw(1, 8, num_rows)
    tokens = int(lengths.sum())
    mask = torch.rand(tokens, generator=generator) < 0.8
    mask[0] = True

    def normal(scale: float, shift: float = 0.0) -> Tensor:
        return ragged(torch.randn(tokens, generator=generator) * scale + shift, lengths)

    columns = {
        "prompts": ragged(draw(0, 64, int(prompt_lengths.sum())), prompt_lengths),
        "responses": ragged(draw(0, 64, tokens), lengths),
        "response_mask": ragged(mask, lengths),
        "old_log_probs": normal(0.5, -4.2),
        "ref_log_probs": normal(0.5, -4.2),
        "advantages": normal(1.0),
        "values": normal(0.3),
        "returns": normal(1.0),
    }
    return TensorDict(columns, batch_size=[num_rows])


def load(folder: Path, kind: str) -> nn.Module:
    """The Hugging Face model itself: a copy of its own for each caller."""
    return copy.deepcopy(_loaded(folder, kind))


@functools.cache
def _loaded(folder: Path, kind: str) -> nn.Module:
    auto = {
        "reward": transformers.AutoModelForSequenceClassification,
        "tied": transformers.AutoModelForCausalLM,
        "untied": transformers.AutoModelForCausalLM,
    }[kind]
    return auto.from_pretrained(folder / kind, dtype=torch.float32).eval()


def reference_step(folder: Path, kind: str, batch: TensorDict, lr: float) -> Reference:
    """One step of torch.optim.AdamW on the token-mean loss of all rows."""
    model = load(folder, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.0, 0.95), weight_decay=0.1)
    row_loss = value_row_loss if kind == "reward" else policy_row_loss
    columns = {str(name): rows_of(batch[name]) for name in batch.keys()}
    tokens = sum(int(row.sum()) for row in columns["response_mask"])
    losses = [
        row_loss(model, {name: rows[i] for name, rows in columns.items()})
        for i in range(batch.batch_size[0])
    ]
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Reference(loss.item(), gradients, weights)


def policy_row_loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    """Sum over the chosen tokens of PPO loss - c H + beta k3."""
    first = len(row["prompts"]) - 1
    joined = torch.cat([row["prompts"], row["responses"]])
    logits = model(joined[None]).logits[0, first:-1] / TEMPERATURE  # (R, V)
    full = logits.log_softmax(-1)
    log_probs = full[torch.arange(len(full)), row["responses"]]
    ratio = (log_probs - row["old_log_probs"]).exp()
    advantage = row["advantages"]
    surrogate = torch.min(ratio * advantage, ratio.clip(1 - CLIP, 1 + CLIP) * advantage)
    entropy = -(full.exp() * full).sum(-1)
    log_ratio = row["ref_log_probs"] - log_probs
    k3 = log_ratio.exp() - 1 - log_ratio
    return (-surrogate - ENTROPY * entropy + KL * k3)[row["response_mask"]].sum()


def value_row_loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    """Sum over the chosen tokens of the clipped squared error / 2."""
    values = row_values(model, row)[len(row["prompts"]) - 1 : -1]  # (R,)
    old = row["values"]
    target = row["returns"]
    near = torch.clip(values, old - VALUE_CLIP, old + VALUE_CLIP)
    worst = torch.max((values - target) ** 2, (near - target) ** 2)
    return worst[row["response_mask"]].sum() / 2


def row_values(model: Any, row: dict[str, Tensor]) -> Tensor:
    """(T,) outputs of the scalar head at every token of one row."""
    joined = torch.cat([row["prompts"], row["responses"]])
    return model.score(model.model(joined[None]).last_hidden_state)[0, :, 0]


def row_log_probs(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    """(R,) log-probs of the response's tokens at TEMPERATURE."""
    joined = torch.cat([row["prompts"], row["responses"]])
    logits = model(joined[None]).logits[0, len(row["prompts"]) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1)[torch.arange(len(row["responses"])), row["responses"]]
