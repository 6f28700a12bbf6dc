"""The same adapters in peft: a module that is trained beside, the merged model, its logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tensordict import TensorDict
from torch import Tensor, nn

from spmdflow.config.model import LoRAConfig
from spmdflow.data.ragged import rows_of

_PREFIX = "base_model.model."


def merged_model(folder: Path, adapters: Mapping[str, Tensor], lora: LoRAConfig) -> Any:
    """The transformers model with these adapters merged in by peft."""
    return peft_model(folder, adapters, lora).merge_and_unload()


def peft_model(folder: Path, adapters: Mapping[str, Tensor], lora: LoRAConfig) -> Any:
    """peft's model of a folder, whose trained tensors have these values. Without dropout."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers = sorted({name.rsplit(".", 3)[1] for name in adapters if ".lora_" in name})
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=layers,
        use_rslora=lora.rslora,
        modules_to_save=list(lora.modules_to_save) or None,
        ensure_weight_tying=bool(lora.modules_to_save) and base.config.tie_word_embeddings,
    )
    model = peft.get_peft_model(base, config).eval()
    found = adapters_of(model)
    assert found.keys() == adapters.keys(), set(found) ^ set(adapters)
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(adapters[name])
    return model


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """What peft trains, named as here."""
    return {
        name.removeprefix(_PREFIX)
        .replace(".modules_to_save.default.", ".")
        .replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def peft_step(
    model: Any, batch: TensorDict, *, lr: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, and A and B after one step of torch's AdamW on the token-mean loss of all rows."""
    from fsdp_reference import policy_row_loss

    trained = adapters_of(model)
    optimizer = torch.optim.AdamW(trained.values(), lr=lr, betas=(0.0, 0.95), weight_decay=0.1)
    columns = {str(name): rows_of(batch[name]) for name in batch.keys()}
    tokens = sum(int(row.sum()) for row in columns["response_mask"])
    rows = [{n: x[i] for n, x in columns.items()} for i in range(batch.batch_size[0])]
    loss = torch.stack([policy_row_loss(model, row) for row in rows]).sum() / tokens
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    optimizer.step()
    return gradients, {name: p.detach().clone() for name, p in trained.items()}
