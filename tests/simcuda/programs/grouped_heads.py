"""FSDP's model of Qwen2's shape in float32 on a simulated device; prints JSON.

python grouped_heads.py FOLDER   {"waits": what the host waited for, "gap": from logits on the CPU}
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch
import transformers
from tensordict import TensorDict

from spmdflow.config.schema import ModelConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.workers.micro_batch import micro_batches
from spmdflow.workers.model import load_model
from spmdflow.workers.sharding import read_weights


def main(folder: str) -> None:
    import surface  # beside the library that the import of torch loads

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    ids = {"prompts": ragged_from_rows([torch.arange(1)])}
    ids["responses"] = ragged_from_rows([torch.arange(1, 12)])
    found = {}
    for device in ("cpu", "cuda:0"):
        model = load_model(ModelConfig(path=folder), head="causal_lm")
        module = read_weights(model, torch.device(device))
        waits = Counter[str]()
        surface.native.on_sync(lambda what, size, waits=waits: waits.update([what]))
        (micro,) = micro_batches(
            TensorDict(ids, batch_size=[1]),
            num_micro_batches=1,
            by_tokens=False,
            device=torch.device(device),
        )
        output = module(micro, lambda output, _: output)
        logits = output.hidden @ output.weight.T
        logits.logsumexp(-1).sum().backward()
        surface.native.on_sync(None)
        gradients = [parameter.grad.cpu() for parameter in module.parameters()]
        found[device] = [logits.detach().cpu(), *gradients]
    gaps = [float((a - b).abs().max()) for a, b in zip(*found.values(), strict=True)]
    print(json.dumps({"waits": waits, "gap": max(gaps)}))


if __name__ == "__main__":
    main(sys.argv[1])
