"""What a vLLM model reads, by Hugging Face name: live views, their boxes, and their hashes.

The boxes come from the tables of `weights`: `vllm_shards` for vLLM's own parameters, the
trainer's `megatron_shards` where its shards replace them (`vllm_blocks`). The table of another
family is derived (`vllm_derived`). This file uses modules, not vLLM.
"""

from __future__ import annotations

import logging
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
from spmdflow.rollout.vllm_derived import DerivedTables, derive_tables
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block, blocks
from spmdflow.weights.ranks import vllm_shards
from spmdflow.weights.recorded import is_recorded
from spmdflow.weights.table import LocalTensor, ShardTable, parameters

logger = logging.getLogger(__name__)

Slot = tuple[str, Box]
"""(Hugging Face name, box): the unit of hashing."""


@dataclass(frozen=True)
class Reading:
    """The tensors that the ranks of a replica read in their forward pass.

    A box is either on one rank, or completely on several (norms, kv heads fewer than ranks, the
    embedding of a tied model's two end stages). Other overlaps do not occur.
    """

    shapes: Mapping[str, torch.Size]
    """Shape of every complete tensor."""
    blocks: Sequence[Block]
    """This rank's live views."""
    slots_of_ranks: Sequence[frozenset[Slot]]
    """The slots that each rank of the replica reads, by its rank in the replica."""
    constants: frozenset[str] = frozenset()
    """Names of vLLM's parameters that no sync brings, and that keep the folder's values."""

    def hashes(self, replica: Replica, device: torch.device) -> dict[str, int]:
        """Hashes of complete tensors, in which every box counts once. A collective over the
        replica.

        WeightSyncError if ranks that hold the same box have different values.
        """
        own = {}
        for name, view, box in self.blocks:
            own[(name, box)] = box_sum(view, box)
        return combine_hashes(
            read_sums(own),
            self.shapes,
            self.slots_of_ranks,
            ranks=replica.ranks,
            gather=lambda values: replica.gather(values.to(device)),
        )


def combine_hashes(
    own: Mapping[Slot, int],
    names: Iterable[str],
    slots_of_ranks: Sequence[frozenset[Slot]],
    *,
    ranks: Sequence[int],
    gather: Callable[[Tensor], Sequence[Tensor]],
) -> dict[str, int]:
    """Returns the hash of every complete tensor: the sum of its boxes' hashes modulo 2**64.

    Every box counts once, also if several ranks have it; WeightSyncError if their values differ. A
    tensor of `names` without boxes gets 0.

    own: this rank's hashes. slots_of_ranks: the boxes of each rank, in the order of ranks.
    gather: collective from this rank's int64 values to those of all ranks.
    """
    slots = sorted(frozenset().union(*slots_of_ranks))
    mine = torch.tensor([to_signed(own.get(slot, 0)) for slot in slots])
    values_of_ranks = torch.stack(list(gather(mine))).tolist()
    totals = dict.fromkeys(names, 0)
    for number, slot in enumerate(slots):
        holders = []
        for index, boxes in enumerate(slots_of_ranks):
            if slot in boxes:
                holders.append(index)
        values = [values_of_ranks[index][number] for index in holders]
        if len(set(values)) > 1:
            name, box = slot
            other = next(index for index, value in enumerate(values) if value != values[0])
            readers = tuple(ranks[index] for index in holders)
            raise WeightSyncError(
                f"weights: got rollout tensor {name}, box {box.bounds}, with hash "
                f"{values[0] % MODULUS:#018x} on rank {readers[0]} and "
                f"{values[other] % MODULUS:#018x} on rank {readers[other]}, expected the same on "
                f"ranks {readers}, which all read it; the run must not continue with these "
                f"weights: report this message"
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
    """The slots of some tensors of a weight table."""
    return frozenset((piece.name, piece.box) for tensor in tensors for piece in tensor.pieces)


def stock_table(arch: Architecture, replica: Replica, replica_rank: int) -> ShardTable:
    """vLLM's own tensors of one rank of the replica."""
    pp_rank, tp_rank = divmod(replica_rank, replica.tp_size)
    return vllm_shards(
        arch,
        tp_size=replica.tp_size,
        tp_rank=tp_rank,
        pp_size=replica.pp_size,
        pp_rank=pp_rank,
        divides_experts=replica.divides_experts,
    )


def read_stock_weights(
    model: Any, model_path: str, replica: Replica, adapter: PolicyAdapter | None = None
) -> Reading:
    """Returns the `Reading` of vLLM's own parameters and, if there is one, of the adapter.

    Boxes come from the weight table of the model's family. Without a table they are derived
    (`vllm_derived`); ConfigError then if there is an adapter. ConfigError too if vLLM has other
    tensors than the table states.
    """
    arch = Architecture.sizes_from_folder(model_path)
    if not arch.is_dense_with_table:
        if adapter is not None:
            raise ConfigError(arch.obstacle or _no_adapters_text(model_path))
        derived = derive_tables(model, model_path, replica)
        difference = difference_from_recorded(arch, derived, replica)
        if difference:
            text = "warning: vLLM's table of %s is not the recorded one, which plans use: %s"
            logger.warning(text, model_path, difference)
        own = derived.tables[replica.replica_rank]
        views = list(blocks(dict(model.named_parameters()), own))
        slots = [slots_of(table.values()) for table in derived.tables]
        return Reading(derived.shapes, views, slots, derived.constants)
    parameters = {}
    for n, p in model.named_parameters():
        parameters[n.replace(".base_layer.", ".")] = p
    if adapter is not None:
        parameters |= adapter.views(stock_table(arch, replica, replica.replica_rank))
        arch = replace(arch, adapters=adapter.adapters)
    tables = []
    for replica_rank in range(replica.size):
        tables.append(stock_table(arch, replica, replica_rank))
    mine = tables[replica.replica_rank]
    _check_names(parameters, mine, model_path)
    slots_of_ranks = [slots_of(table.values()) for table in tables]
    return Reading(whole_shapes(arch), list(blocks(parameters, mine)), slots_of_ranks)


def difference_from_recorded(arch: Architecture, derived: DerivedTables, replica: Replica) -> str:
    """The first difference of this rank's derived table from the recorded one.

    Empty if there is none, or if the architecture is not recorded.
    """
    if arch.obstacle:
        tensors = tuple((name, tuple(shape)) for name, shape in derived.shapes.items())
        arch = replace(arch, tensors=tensors)
    if not is_recorded(arch):
        return ""
    try:
        recorded = stock_table(arch, replica, replica.replica_rank)
    except ConfigError as err:
        return str(err)
    own = derived.tables[replica.replica_rank]
    for name in dict.fromkeys([*recorded, *own]):
        if name not in recorded or name not in own:
            return f"only one of them has {name}"
        if not own[name].has_elements_of(recorded[name]):
            return f"{name} has other elements"
    return ""


def _no_adapters_text(model_path: str) -> str:
    return (
        f"rollout.weights: got adapter for {model_path}, a mixture of experts, expected a dense "
        f"model; set actor.rollout.weights=copy, which merges the adapters"
    )


def _check_names(parameters: Mapping[str, Tensor], table: ShardTable, model_path: str) -> None:
    """ConfigError unless the parameters have the names and shapes of the table."""
    shapes = {}
    for name, tensor in parameters.items():
        shapes[name] = tuple(tensor.shape)
    expected = {}
    for name, local in table.items():
        expected[name] = local.shape
    wrong = sorted(
        name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name)
    )
    if wrong:
        raise ConfigError(
            f"rollout.engine=vllm: got parameter {wrong[0]} of shape {shapes.get(wrong[0])} "
            f"in vLLM's model of {model_path}, expected {expected.get(wrong[0])} by the weight "
            f"table ({len(wrong)} differ); install a tested vLLM or set "
            f"actor.rollout.engine={generator_names()[0]}"
        )
