"""Tiny models of each family, and one plain Hugging Face step on them, row by row, no padding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from fsdp_reference import policy_row_loss, value_row_loss
from tensordict import TensorDict
from torch import Tensor, nn

from spmdflow.data.ragged import rows_of

VOCABULARY = 90  # padded to 128: of four shards one has padding alone
LAYERS = 3  # two stages get two and one
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": VOCABULARY - 1,  # in no row: Hugging Face gives its embedding no gradient
    "initializer_range": 0.1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (family, what differs): together they have every feature twice or more
    "llama": ("Llama", {"num_key_value_heads": 2, "rope_parameters": _LLAMA3}),
    "llama-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biased": (
        "Llama",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12}),
    "qwen3-tied": (
        "Qwen3",
        {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "llama-deep": (
        "Llama",
        {"num_key_value_heads": 2, "num_hidden_layers": 9, "tie_word_embeddings": True},
    ),
    "reward": ("Llama", {"num_key_value_heads": 2, "num_labels": 1}),
}


@dataclass
class Reference:
    """Logits (or values) of each row, loss, gradient and weights after one AdamW step."""

    outputs: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def write_models(folder: Path) -> None:
    """A folder for each of FAMILIES; norms and biases are random too."""
    transformers.utils.logging.disable_progress_bar()
    for seed, (name, (family, extra)) in enumerate(FAMILIES.items()):
        torch.manual_seed(seed)
        head = "SequenceClassification" if name == "reward" else "CausalLM"
        config = getattr(transformers, f"{family}Config")(**{**_SIZES, **extra})
        model = getattr(transformers, f"{family}For{head}")(config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key or key.endswith("bias"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")


def load(folder: Path, name: str) -> Any:
    """The Hugging Face model itself."""
    head = "SequenceClassification" if name in ("reward", "critic") else "CausalLM"
    auto: Any = getattr(transformers, f"AutoModelFor{head}")
    return auto.from_pretrained(folder / name, dtype=torch.float32, num_labels=1).eval()


def outputs_of(model: Any, name: str, batch: TensorDict) -> list[Tensor]:
    """(R, V) logits or (R,) values where each token of a row's response is predicted."""
    rows = zip(rows_of(batch["prompts"]), rows_of(batch["responses"]), strict=True)
    found = []
    with torch.no_grad():
        for prompt, response in rows:
            ids = torch.cat([prompt, response])[None]
            if name == "reward":
                whole = model.score(model.model(ids).last_hidden_state)[0, :, 0]
            else:
                whole = model(ids).logits[0]
            found.append(whole[len(prompt) - 1 : -1])
    return found


def reference_step(folder: Path, name: str, batch: TensorDict, lr: float) -> Reference:
    """One step of torch.optim.AdamW on the token-mean loss of all rows."""
    model: nn.Module = load(folder, name)
    outputs = outputs_of(model, name, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.0, 0.95), weight_decay=0.1)
    columns = {str(key): rows_of(batch[key]) for key in batch.keys()}
    tokens = sum(int(row.sum()) for row in columns["response_mask"])
    row_loss = value_row_loss if name == "reward" else policy_row_loss
    losses = [
        row_loss(model, {key: rows[i] for key, rows in columns.items()})
        for i in range(batch.batch_size[0])
    ]
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    return Reference(outputs, loss.item(), gradients, weights)
