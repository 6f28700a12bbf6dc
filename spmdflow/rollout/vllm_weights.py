"""What a vLLM model reads, by Hugging Face name: live views, their boxes, and their hashes.

The boxes come from the tables of `weights`: `vllm_shards` for vLLM's own parameters, the
trainer's `megatron_shards` where its shards replace them (`vllm_blocks`). A family without a
table is read on one rank only, by its modules' attributes. Knows modules, not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import MODULUS, box_sum, read_sums, to_signed
from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.kind.generator import generator_names
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.vllm_adapter import PolicyAdapter
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block, blocks
from spmdflow.weights.ranks import vllm_shards
from spmdflow.weights.table import LocalTensor, ShardTable, parameters

Slot = tuple[str, Box]
"""(Hugging Face name, box): what is hashed as a unit."""


@dataclass(frozen=True)
class Reading:
    """What the ranks of a replica read in their forward pass.

    A box is on one rank, or whole on several (norms, kv heads fewer than ranks, the embedding
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
        own = {}
        for name, view, box in self.blocks:
            own[(name, box)] = box_sum(view, box)
        return joined_hashes(
            read_sums(own),
            self.shapes,
            self.held,
            ranks=replica.ranks,
            gather=lambda values: replica.gather(values.to(device)),
        )


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
        holders = []
        for place, boxes in enumerate(held):
            if slot in boxes:
                holders.append(place)
        values = [everyone[place][number] for place in holders]
        if len(set(values)) > 1:
            name, box = slot
            other = next(place for place, value in enumerate(values) if value != values[0])
            readers = tuple(ranks[place] for place in holders)
            raise WeightSyncError(
                f"weights: got rollout tensor {name}, box {box.bounds}, with hash "
                f"{values[0] % MODULUS:#018x} on rank {readers[0]} and "
                f"{values[other] % MODULUS:#018x} on rank {readers[other]}, expected the same on "
                f"ranks {readers}, which all read it; the run must not go on with these weights: "
                f"report this message"
            )
        totals[slot[0]] = (totals[slot[0]] + values[0]) % MODULUS
    return totals


def whole_shapes(arch: Architecture) -> dict[str, torch.Size]:
    """Shape of every tensor of an architecture, by Hugging Face name."""
    result = {}
    for parameter in parameters(arch):
        result[parameter.name] = torch.Size(parameter.shape)
    return result


def slots_of(tensors: Iterable[LocalTensor]) -> frozenset[Slot]:
    """The boxes in some tensors of a table."""
    return frozenset((piece.name, piece.box) for tensor in tensors for piece in tensor.pieces)


def stock_table(arch: Architecture, replica: Replica, place: int) -> ShardTable:
    """vLLM's own tensors of a rank, by its place in the replica."""
    pp_rank, tp_rank = divmod(place, replica.tp_size)
    return vllm_shards(
        arch, tp_size=replica.tp_size, tp_rank=tp_rank, pp_size=replica.pp_size, pp_rank=pp_rank
    )


def stock_reading(
    model: Any, model_path: str, replica: Replica, adapter: PolicyAdapter | None = None
) -> Reading:
    """The reading of vLLM's own parameters, and of the adapter beside them.

    ConfigError if the model is cut over ranks and its family has no table, or if vLLM holds other
    tensors than the table says.
    """
    try:
        arch = Architecture.from_folder(model_path)
    except ConfigError:
        if replica.size > 1 or adapter is not None:
            raise
        views = hugging_face_views(model)
        whole = []
        for name, view in views.items():
            whole.append((name, view, Box.of_shape(view.shape)))
        shapes = {}
        for name, view in views.items():
            shapes[name] = view.shape
        return Reading(shapes, whole, [frozenset((name, box) for name, _, box in whole)])
    parameters = {}
    for n, p in model.named_parameters():
        parameters[n.replace(".base_layer.", ".")] = p
    if adapter is not None:
        parameters |= adapter.views(stock_table(arch, replica, replica.place))
        arch = replace(arch, adapters=adapter.adapters)
    tables = []
    for place in range(replica.size):
        tables.append(stock_table(arch, replica, place))
    mine = tables[replica.place]
    _check_names(parameters, mine, model_path)
    held = [slots_of(table.values()) for table in tables]
    return Reading(whole_shapes(arch), list(blocks(parameters, mine)), held)


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
        layer = model.get_submodule(path)
        tensor = parameter.detach()
        if layer_name in fused:
            parts = tensor.split(list(layer.output_sizes))
            names = []
            for part in fused[layer_name]:
                names.append(f"{parent}.{part}.{kind}")
            views.update(zip(names, parts, strict=True))
        else:
            views[name] = tensor[: getattr(layer, "org_vocab_size", len(tensor))]
    return views


def _check_names(parameters: Mapping[str, Tensor], table: ShardTable, model_path: str) -> None:
    shapes = {}
    for name, tensor in parameters.items():
        shapes[name] = tuple(tensor.shape)
    described = {}
    for name, local in table.items():
        described[name] = local.shape
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
