"""Bytes that a forward saves for its backward, on ranks that divide a row, and on one rank alone.

Usage: torchrun --nproc-per-node 4 context_memory.py FOLDER
Rank 0 writes FOLDER/results.json: {ATTENTION-cN: most bytes of any rank}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import transformers
from context_objectives import build, make_groups
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ragged_from_rows
from spmdflow.objectives.supervised import SupervisedLoss
from spmdflow.parallel.layout import Layout
from spmdflow.workers.context_group import GATHER, RING, ULYSSES
from spmdflow.workers.engine import TrainEngine
from tests.saved_bytes import record_saved_bytes

LENGTH = 4096


def main() -> None:
    """Measure one row of 4,096 tokens with c 1, 2 and 4."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layouts = {size: Layout(tuple(range(size)), dp_size=1, cp_size=size) for size in (1, 2, 4)}
    groups = make_groups(rank, layouts.values())
    if rank == 0:
        torch.manual_seed(0)
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
        config = transformers.LlamaConfig(
            vocab_size=97, max_position_embeddings=LENGTH, **sizes, **heads
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    dist.barrier()
    found = {}
    for attention in (ULYSSES, GATHER, RING):
        for size, layout in layouts.items():
            saved = torch.zeros(1)
            if rank in layout.ranks:
                kind = f"fsdp-{attention}" if size < 4 else f"fsdp-{attention}-saves"
                engine = build(folder / "model", kind, layout, "causal_lm", rank, groups)
                saved[0] = saved_bytes(engine)
            dist.all_reduce(saved, dist.ReduceOp.MAX)
            found[f"{attention}-c{size}"] = int(saved)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def saved_bytes(engine: TrainEngine) -> int:
    """Bytes of the tensors saved for the backward of one row, without the weights."""
    draw = torch.Generator().manual_seed(1)
    prompt, response = (torch.randint(1, 97, (size,), generator=draw) for size in (1, LENGTH - 1))
    learnt = torch.ones_like(response, dtype=torch.bool)
    columns = {"prompts": [prompt], "responses": [response], "response_mask": [learnt]}
    batch = {name: ragged_from_rows(rows) for name, rows in columns.items()}
    weights = {view.untyped_storage().data_ptr() for _, view, _ in engine.own_blocks()}

    def is_activation(tensor: Tensor) -> bool:
        return tensor.ndim > 1 and tensor.untyped_storage().data_ptr() not in weights

    with record_saved_bytes(is_activation) as num_bytes:
        engine.train_step(TensorDict(batch, batch_size=[1]), SupervisedLoss(), num_micro_batches=1)
    return sum(num_bytes.values())


if __name__ == "__main__":
    main()
