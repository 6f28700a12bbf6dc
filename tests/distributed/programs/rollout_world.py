"""What the checks of vLLM on several ranks share: layouts, models, comparisons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rollout_sync import from_folder
from torch import Tensor

from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import rows_of
from spmdflow.errors import SpmdflowError
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm_blocks import Shards, shard_tensors, vllm_names
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import fill
from spmdflow.weights.ranks import megatron_shards
from tests.rollout_reference import (
    END,
    disagreements,
    ended_at,
    load,
    make_prompts,
    num_close,
    reference,
    write_numbers_tokenizer,
)

CPU = torch.device("cpu")
GREEDY = Sampling(8, greedy=True)
SAMPLED = Sampling(8, temperature=0.8, top_k=40)
STOP = ["7>", "<1"]
TOLERANCE = 1e-5
SEEDS = [2**62 + row for row in range(6)]
LAYOUTS = {
    "t2 beside t2": Layout((0, 1, 2, 3), tp_size=2, dp_size=2),
    "t2 strided": Layout((0, 1, 2, 3), tp_size=4, gen_tp_size=2),
    "t4": Layout((0, 1, 2, 3), tp_size=4),
    "t2 on ranks 2 and 3": Layout((2, 3), tp_size=2),
    "four of t1": Layout((0, 1, 2, 3), tp_size=4, gen_tp_size=1),
    "p2 strided": Layout((0, 1, 2, 3), tp_size=2, pp_size=2, gen_tp_size=1),
    "t2p2": Layout((0, 1, 2, 3), tp_size=2, pp_size=2),
}
DATA_PARALLEL = Layout.data_parallel((0, 1, 2, 3), shard_size=4)


@dataclass
class World:
    """What the checks share on one rank."""

    rank: int
    groups: GroupTable
    folder: Path

    def path(self, family: str) -> Path:
        """Folder of a family's model."""
        return self.folder / family.replace(" ", "_")

    def replica(self, layout: Layout) -> Replica:
        """This rank's replica."""
        return Replica.of(layout, self.rank, self.groups)

    def generator(self, family: str, layout: Layout, **settings: Any) -> Any:
        """This rank's part of a vLLM generator."""
        cfg = RolloutConfig(engine="vllm", max_batch_size=8, kv_cache_gib=0.015625, **settings)
        return from_folder(cfg, str(self.path(family)), self.replica(layout))

    def prompts(self, layout: Layout) -> Tensor:
        """Prompts that differ between replicas."""
        return make_prompts(len(SEEDS), vocab_size=100, seed=layout.generation_replica(self.rank))


def message(action: Callable[[], object]) -> str:
    """The text of the error that action raises, or nothing."""
    try:
        action()
    except SpmdflowError as err:
        return f"{type(err).__name__}: {err}"
    return ""


def trained(world: World, family: str, seed: int) -> dict[str, Tensor]:
    """Other weights for a family's model: what an update might have made."""
    torch.manual_seed(seed)
    model = load(world.path(family))
    return {n: p.detach() + 0.05 * torch.randn_like(p) for n, p in model.named_parameters()}


def with_weights(world: World, family: str, weights: dict[str, Tensor]) -> Any:
    """The transformers model with those weights."""
    model = load(world.path(family))
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


def compare(world: World, generator: Any, layout: Layout, model: Any) -> dict[str, Any]:
    """Greedy and sampled responses, compared with transformers by a replica's first rank."""
    prompts = world.prompts(layout)
    first = world.replica(layout).ranks[0] == world.rank
    faults = []
    close = 0
    tokens = []
    for sampling in (GREEDY, SAMPLED):
        found = generator.generate(prompts, sampling, SEEDS)
        if first:
            expected = reference(model, prompts, sampling, SEEDS, (END,))
            faults += disagreements(found, expected, tolerance=TOLERANCE)
            close += num_close(expected)
        tokens.append(found["responses"].values().tolist())
    free = [row.tolist() for row in rows_of(found["responses"])]
    numbers = write_numbers_tokenizer(world.folder / f"numbers-{world.rank}", 128)
    asked = replace(SAMPLED, tokenizer_path=numbers).for_call(stop=STOP)
    ended = generator.generate(prompts, asked, SEEDS)["responses"]
    expected_rows = ended_at(free, STOP)
    if [row.tolist() for row in rows_of(ended)] != expected_rows or expected_rows == free:
        faults.append(f"stop strings: {free} became {ended}")
    return {"compared": first, "faults": faults, "close": close, "tokens": tokens}


def shards_of(
    weights: dict[str, Tensor], arch: Architecture, replica: Replica, tp_size: int
) -> Shards:
    """A Megatron trainer's tensors of a generation shard, cut from whole weights."""
    per_rank = tp_size // replica.tp_size
    found: dict[str, list[Tensor]] = {}
    names = vllm_names(arch)
    wanted = shard_tensors(
        arch,
        replica,
        tp_size=tp_size,
        vocab_multiple=128,
        replica_rank=replica.replica_rank,
    )
    for shard in range(replica.tp_rank * per_rank, (replica.tp_rank + 1) * per_rank):
        table = megatron_shards(
            arch, tp_size=tp_size, tp_rank=shard, pp_size=1, pp_rank=0, vocab_multiple=128
        )
        local = {name: torch.full(tensor.shape, 9.0) for name, tensor in table.items()}
        fill(local, table, lambda name, box: weights[name][box.slices()])
        for name, tensor in local.items():
            found.setdefault(names[name], []).append(tensor)
    return {name: found[name][: len(tensors)] for name, tensors in wanted.items()}


class Logits:
    """Every logits tensor that a generator's sampler gets."""

    def __init__(self, generator: Any) -> None:
        self.seen: list[Tensor] = []
        sampler = generator._sampler
        sampler.register_forward_pre_hook(
            lambda module, args, kwargs: self.seen.append(kwargs["logits"]), with_kwargs=True
        )

    def take(self) -> Tensor:
        """(draws, V), in order; forgets them."""
        taken = torch.cat(self.seen)
        self.seen = []
        return taken
