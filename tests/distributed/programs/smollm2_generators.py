"""Three ranks, greedy responses with the weights of SmolLM2-135M-Instruct in float32.

Usage: torchrun --nproc-per-node 3 smollm2_generators.py FOLDER COUNT
FOLDER/prompts.json has the prompts; responses have at most COUNT tokens. Writes
FOLDER/responses.json: tokens and log-probabilities, by generator. All ranks of a replica must have
the same tokens, or this ends with an error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import lengths_of, ragged_from_rows, rows_of
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import Replica, generator_of, take_folder_weights
from spmdflow.rollout.sampling import Sampling
from tests.smollm2 import SMOLLM2

GENERATORS = {
    "builtin": ("builtin", Layout((0,))),
    "vllm t1": ("vllm", Layout((0,))),
    "vllm t3": ("vllm", Layout((0, 1, 2), tp_size=3)),
}
"""Name -> engine and layout."""
CACHE_GIB = 0.25


def main(folder: Path, count: int) -> None:
    """Generate with one generator after the other."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    groups = GroupTable(rank, timeout_seconds=600)
    groups.make([GroupSpec((0, 1, 2), "compute", "gloo")])
    prompts = [torch.tensor(ids) for ids in json.loads((folder / "prompts.json").read_text())]
    responses = {}
    for name, (engine, layout) in GENERATORS.items():
        if rank in layout.ranks:
            replica = Replica.of(layout, rank, groups)
            responses[name] = respond(engine, replica, prompts, count)
        dist.barrier()
    if rank == 0:
        (folder / "responses.json").write_text(json.dumps(responses))
    dist.destroy_process_group()


def respond(
    engine: str, replica: Replica, prompts: list[torch.Tensor], count: int
) -> dict[str, Any]:
    """The likeliest responses: tokens and log-probabilities of each row."""
    ragged = ragged_from_rows(prompts)
    cfg = RolloutConfig(
        engine=engine,
        dtype="float32",
        max_batch_size=len(prompts),
        max_prompt_tokens=int(lengths_of(ragged).max()),
        max_new_tokens=count,
        kv_cache_gib=CACHE_GIB,
    )
    generator: Any = generator_of(cfg, str(SMOLLM2), torch.device("cpu"), replica)
    compared = take_folder_weights(generator, str(SMOLLM2), verify=True)
    assert compared > 0
    found = generator.generate(ragged, Sampling(count, greedy=True), list(range(len(prompts))))
    generator.close()
    columns = {
        "tokens": [row.tolist() for row in rows_of(found["responses"])],
        "log_probs": [row.tolist() for row in rows_of(found["rollout_log_probs"])],
    }
    replica.check_equal("responses", lambda: columns["tokens"], torch.device("cpu"))
    return columns


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
