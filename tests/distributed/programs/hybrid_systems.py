"""Every system of Table 2 in every layout: what each rank receives and holds, as seen from outside.

Bytes on the wire are counted where torch.distributed is called, bytes held by looking at every
tensor of the process, the peak by torch's allocator. The figures go back to the test, which
compares them with `cost_of`.
"""

from __future__ import annotations

import gc
import time
import warnings
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from bench._cost import SYSTEMS, Case, Cost, cost_of
from bench._counters import WireCounter, peak_allocated
from bench._systems import Seat, System, groups_of, system_of

from spmdflow.blocks.box import subtract_all
from spmdflow.errors import ConfigError
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.weights.ranks import vllm_tables
from tests.unit.resharding import arch_for, crossing_layouts, nested_layouts
from tests.unit.weight_shapes import reader_of, values_of

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True, "num_hidden_layers": 5},
    "one kv head": {"model_type": "llama", "kv_heads": 1},
}
"""Changes to the tiny architecture. Five layers: uneven stages."""
ALONE_BYTES = {"qwen3": 1 << 20, "qwen3 tied": 128, "one kv head": 128}
"""Where small, most weights travel in place; where large, all are packed and staging is exact."""
BASE = {"hidden_size": 8, "head_dim": 4}
CPU = torch.device("cpu")
SMALL_BUCKET = 2048
"""Bytes; several buckets for every model."""


@dataclass(frozen=True)
class Setting:
    """One row of the measured table."""

    key: str
    """System, and for hybridflow the mode."""
    model: str
    case: Case

    @property
    def num_ranks(self) -> int:
        """Both pools' if there are two."""
        return self.case.layout.size + (self.case.rollout.size if self.case.rollout else 0)

    def cost(self) -> Cost:
        """What is predicted; ConfigError if the system does not apply."""
        name, _, mode = self.key.partition(" ")
        return cost_of(name, self.case, mode=mode)


def settings(world: int, models: tuple[str, ...]) -> list[Setting]:
    """Everything that fits into so many ranks; of more than four, only what needs more."""
    found = []
    for model in models:
        for layout in nested_layouts(world):
            for key in SYSTEMS:
                found += _of(key, model, layout, world)
        for layout in crossing_layouts(world):
            found += _of("hybridflow copy", model, layout, world)
    return found if world <= 4 else [each for each in found if each.num_ranks > 4]


def _of(key: str, model: str, layout: Layout, world: int) -> list[Setting]:
    ranks = lcm(layout.tp_size, layout.gen_tp_size)
    vocab_size = 190 if world <= 4 else 6717  # padded alike for every t up to 4, or up to 8
    base = BASE | {"vocab_size": vocab_size, "num_hidden_layers": world}
    arch = arch_for(ranks, **base | MODELS[model])
    case = Case(arch, layout, bucket_bytes=SMALL_BUCKET)
    if key == "two_copies":
        replica = layout.gen_tp_size * layout.gen_pp_size
        spare = tuple(range(layout.size, world))
        spare = spare[: len(spare) // replica * replica]
        if not spare:
            return []
        sizes = {"tp_size": layout.gen_tp_size, "pp_size": layout.gen_pp_size}
        case = replace(case, rollout=Layout(spare, dp_size=len(spare) // replica, **sizes))
    if key == "hybridflow flat":
        return [Setting(key, model, each) for each in (case, replace(case, gathers_rows=True))]
    return [Setting(key, model, case)]


def measure_all(models: tuple[str, ...]) -> list[dict[str, Any] | None]:
    """On every rank: what it saw of each setting; None where it does not take part."""
    warnings.filterwarnings("ignore")
    rank = dist.get_rank()
    found = []
    groups = GroupTable(rank, timeout_seconds=600)
    for setting in settings(dist.get_world_size(), models):
        try:
            cost = setting.cost()
        except ConfigError:
            found.append(None)
            continue
        groups.make(GroupSpec(ranks, "compute", "gloo") for ranks in groups_of(cost))
        found.append(_measured(setting, cost, groups) if rank in cost.received else None)
    return found


def _measured(setting: Setting, cost: Cost, groups: GroupTable) -> dict[str, Any]:
    """One setting twice: counted, and once more under torch's allocator."""
    rank = dist.get_rank()
    values = {name: value.float() for name, value in values_of(setting.case.arch).items()}
    training = cost.training[rank].total
    generation = cost.generation[rank].total
    weights = Weights()
    alone_bytes = ALONE_BYTES[setting.model]
    seat = Seat(rank, groups, torch.float32, CPU, 60.0, alone_bytes)
    system = system_of(setting.case, cost, seat)
    system.load(reader_of(values))
    found: dict[str, Any] = {"training": weights.num_bytes(training)}
    with WireCounter() as wire:
        found["returned"] = system.gather()
    found |= {"wire": wire.received, "sent": wire.sent}
    found["height"] = weights.num_bytes(height_of(cost, rank))
    found["wrong"] = _wrong(setting, system, values)
    system.cut()
    found["generation"] = weights.num_bytes(generation)
    found["wrong"] += _wrong(setting, system, values)
    system.release()
    found["released"] = weights.num_bytes(training)
    most, _ = peak_allocated(system.gather)
    return found | {"peak": found["released"] + most}


def height_of(cost: Cost, rank: int) -> int:
    """Bytes at the height of a transition: what generation gathers, and shards beside it."""
    if cost.system == "two_copies":
        return cost.training[rank].total
    return cost.peak[rank].total + cost.redundant[rank].total


def _wrong(setting: Setting, system: System, values: Any) -> list[str]:
    """Tensors that generation would not read right: boxes with other values, or absent ones."""
    case = setting.case
    rank = dist.get_rank()
    found = list(system.generation())
    wrong = [name for name, view, box in found if not torch.equal(view, values[name][box.slices()])]
    if system.cost.system == "shared":
        return wrong
    layout = case.rollout or case.layout
    table = vllm_tables(case.arch, layout)[rank] if rank in layout.ranks else {}
    one_copy = system.cost.mode in ("flat", "blocks")
    joined = one_copy and case.arch.num_kv_heads < case.layout.tp_size
    for tensor in table.values():
        for name, box in [(piece.name, piece.box) for piece in tensor.pieces]:
            if joined and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
                continue  # heads are cut through: the ranks join what their shards give
            held = [whole for other, _, whole in found if other == name]
            if subtract_all([box], held):
                wrong.append(name)
    return wrong


class Weights:
    """Bytes of all storages of this process that tensors show, less those from before."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # what is there now is not looked at again

    def num_bytes(self, expected: int) -> int:
        """Unique storages of floats, their whole lengths.

        gloo's threads let go of what they sent a moment later: a while to come to expected.
        """
        deadline = time.monotonic() + 60
        while (found := self._num_bytes()) != expected and time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    def _num_bytes(self) -> int:
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        storages = [t.untyped_storage() for t in tensors if t.is_floating_point()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
