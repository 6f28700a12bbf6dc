"""What a vLLM model reads, by Hugging Face name: live views, their boxes, and their hashes.

The boxes come from the tables of `weights`: `vllm_shards` for vLLM's own parameters, the
trainer's `megatron_shards` where its shards stand in for them (`vllm_blocks`). A family without a
table is read on one rank only, by what its modules say of themselves. Knows modules, not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import MODULUS, box_hash, to_signed
from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.kind.generator import generator_names
from spmdflow.rollout.replica import Replica
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block, blocks
from spmdflow.weights.ranks import vllm_shards
from spmdflow.weights.table import ShardTable, parameters

Slot = tuple[str, Box]
"""(Hugging Face name, box): what is hashed as one."""


@dataclass(frozen=True)
class Reading:
    """What the ranks of a replica read in their forward pass.

    A box lies on one rank, or whole on several (norms, kv heads fewer than ranks, the embedding
    of a tied model's two end stages); other overlaps do not occur.
    """

    shapes: Mapping[str, torch.Size]
    """Shape of every whole tensor."""
    blocks: Sequence[Block]
    """This rank's live views."""
    held: Sequence[frozenset[Slot]]
    """What every rank of the replica reads, by its place in it."""

    def hashes(self, replica: Replica, device: torch.device) -> dict[str, int]:
        """Whole tensors' hashes: every box counted once; a collective over the replica.

        WeightSyncError if ranks that hold the same box hold different values.
        """
        own = {(name, box): self._hash(name, view, box) for name, view, box in self.blocks}

        def gather(values: Tensor) -> list[Tensor]:
            return replica.gather(values.to(device))

        return joined_hashes(own, self.shapes, self.held, ranks=replica.ranks, gather=gather)

    def _hash(self, name: str, view: Tensor, box: Box) -> int:
        return box_hash(view, box, self.shapes[name])


def joined_hashes(
    own: Mapping[Slot, int],
    names: Iterable[str],
    held: Sequence[frozenset[Slot]],
    *,
    ranks: Sequence[int],
    gather: Callable[[Tensor], Sequence[Tensor]],
) -> dict[str, int]:
    """Hashes of whole tensors from those of each rank's boxes, every box counted once.

    own: this rank's; held: every rank's boxes, in the order of ranks. gather: int64 values of one
    rank to those of all, a collective. WeightSyncError if two ranks differ in the same box.
    """
    slots = sorted(frozenset().union(*held))
    mine = torch.tensor([to_signed(own.get(slot, 0)) for slot in slots])
    everyone = torch.stack(list(gather(mine))).tolist()
    totals = dict.fromkeys(names, 0)
    for number, slot in enumerate(slots):
        holders = [place for place, boxes in enumerate(held) if slot in boxes]
        values = [everyone[place][number] for place in holders]
        if len(set(values)) > 1:
            raise _torn(slot, [ranks[place] for place in holders], values)
        totals[slot[0]] = (totals[slot[0]] + values[0]) % MODULUS
    return totals


def whole_shapes(arch: Architecture) -> dict[str, torch.Size]:
    """Shape of every tensor of an architecture, by Hugging Face name."""
    return {parameter.name: torch.Size(parameter.shape) for parameter in parameters(arch)}


def slots_of(tables: Iterable[ShardTable]) -> frozenset[Slot]:
    """The boxes in some tables."""
    return frozenset(
        (piece.name, piece.box)
        for table in tables
        for tensor in table.values()
        for piece in tensor.pieces
    )


def stock_reading(model: Any, model_path: str, replica: Replica) -> Reading:
    """The reading of vLLM's own parameters.

    ConfigError if the model is cut over ranks and its family has no table, or if vLLM holds other
    tensors than the table says.
    """
    try:
        arch = Architecture.from_folder(model_path)
    except ConfigError:
        if replica.size > 1:
            raise
        return _untabled_reading(model)
    tables = [
        vllm_shards(
            arch,
            tp_size=replica.tp_size,
            tp_rank=tp_rank,
            pp_size=replica.pp_size,
            pp_rank=pp_rank,
        )
        for pp_rank in range(replica.pp_size)
        for tp_rank in range(replica.tp_size)
    ]
    mine = tables[replica.ranks.index(replica.rank)]
    parameters = dict(model.named_parameters())
    _check_names(parameters, mine, model_path)
    held = [slots_of([table]) for table in tables]
    return Reading(whole_shapes(arch), list(blocks(parameters, mine)), held)


def _untabled_reading(model: Any) -> Reading:
    views = hugging_face_views(model)
    shapes = {name: view.shape for name, view in views.items()}
    whole = [(name, view, Box.of_shape(view.shape)) for name, view in views.items()]
    return Reading(shapes, whole, [frozenset((name, box) for name, _, box in whole)])


def hugging_face_views(model: Any) -> dict[str, Tensor]:
    """Hugging Face name -> view of the live parameter, tied tensors once; for one rank.

    model: a vLLM module; its `packed_modules_mapping` says what is fused, a fused layer's
    `output_sizes` where to cut, a vocabulary layer's `org_vocab_size` where padding begins.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        parent, _, layer_name = path.rpartition(".")
        layer, tensor = model.get_submodule(path), parameter.detach()
        if layer_name in fused:
            parts = tensor.split(list(layer.output_sizes))
            names = [f"{parent}.{part}.{kind}" for part in fused[layer_name]]
            views.update(zip(names, parts, strict=True))
        else:
            views[name] = tensor[: getattr(layer, "org_vocab_size", len(tensor))]
    return views


def _check_names(parameters: Mapping[str, Tensor], table: ShardTable, model_path: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    described = {name: tensor.shape for name, tensor in table.items()}
    wrong = sorted(
        name for name in shapes.keys() | described.keys() if shapes.get(name) != described.get(name)
    )
    if wrong:
        raise ConfigError(
            f"rollout.engine=vllm: got parameter {wrong[0]} of shape {shapes.get(wrong[0])} in "
            f"vLLM's model of {model_path}, expected {described.get(wrong[0])} by the weight table "
            f"({len(wrong)} differ); install a tested vLLM or set "
            f"actor.rollout.engine={generator_names()[0]}"
        )


def _torn(slot: Slot, ranks: Sequence[int], values: Sequence[int]) -> WeightSyncError:
    name, box = slot
    other = next(place for place, value in enumerate(values) if value != values[0])
    return WeightSyncError(
        f"weights: got rollout tensor {name}, box {box.bounds}, with hash "
        f"{values[0] % MODULUS:#018x} on rank {ranks[0]} and {values[other] % MODULUS:#018x} on "
        f"rank {ranks[other]}, expected the same on ranks {tuple(ranks)}, which all read it; the "
        f"run must not go on with these weights: report this message"
    )
