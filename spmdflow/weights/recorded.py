"""Where vLLM keeps each element of a model: rows for each family, recorded from vLLM's own loader.

`scripts/record_vllm.py` starts vLLM with tiny models of every family on several layouts, reads
where its loader puts each element (`rollout.vllm_derived`), and writes the rows that reproduce all
of it to vllm_rows.json. So a table can be made for any sizes and any layout, without vLLM.

A row is a parameter of vLLM, the way in which ranks divide it, and the tensors of transformers'
module that it consists of. It applies to the layers that have these tensors; layers of different
kinds need no rows of their own. Names of layers' rows are those below the layer. Integers only.

The file has the versions that were recorded, and `recordings`: the rows of some families. In each,
`layers` is the part of a name before a layer's number, and `groups` are [stages, rows] in the order
of the model; a row is [parameter, way, tensors ...].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from spmdflow.blocks.box import Box
from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_names
from spmdflow.weights.adapter import is_adapter
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import (
    Cut,
    LayerRow,
    LocalTensor,
    Piece,
    Way,
    shapes_by_name,
    stage_layers,
)

RECORDS = Path(__file__).with_name("vllm_rows.json")
HEAD = "lm_head.weight"
"""The tensor that a tied model lacks."""
Stages = Literal["first", "ends", "every", "layer", "last"]
"""Pipeline stages that have a row: the first; the first and, of a tied model, the last; all; the
one that has the layer; the last."""
Group = tuple[Stages, Sequence[LayerRow]]
"""Rows that the same stages have."""


def _swapped(way: Way) -> Way:
    """The way for a parameter whose last two axes are those of the tensors the other way round."""

    def cut_swapped(cut: Cut, names: Sequence[str]) -> LocalTensor:
        known = cut.shapes or shapes_by_name(cut.arch)
        shapes = {name: _swap_last(known[name]) for name in names}
        local = way(replace(cut, shapes=shapes), names)
        pieces = []
        for piece in local.pieces:
            axes = _swap_last(range(len(piece.box.bounds)))
            box = Box(_swap_last(piece.box.bounds))
            pieces.append(Piece(piece.name, box, piece.local, axes))
        return LocalTensor(local.shape, tuple(pieces))

    return cut_swapped


def _swap_last(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values with the last two exchanged."""
    return (*values[:-2], values[-1], values[-2])


_WAYS: dict[str, Way] = {
    "whole": Cut.full_tensor,
    "whole on the first rank": Cut.first_rank_only,
    "heads": Cut.heads,
    "axis 0": Cut.rows,
    "axis 1": Cut.columns,
    "axis 2": partial(Cut.divide, axis=2),
    "halves of axis 0": partial(Cut.divide, axis=0, num_parts=2),
    "halves of axis 1": partial(Cut.divide, axis=1, num_parts=2),
    "vocabulary": Cut.vocabulary,
}
WAYS: Mapping[str, Way] = _WAYS | {f"{name}, swapped": _swapped(_WAYS[name]) for name in _WAYS}
"""Ways to divide a parameter, by their names in the file. Axes are the parameter's: the tensors
have the last two in the other order if it is swapped. Halves: gate and up in one tensor, of which a
rank has a part each."""


@dataclass(frozen=True)
class FamilyRows:
    """The rows of a family."""

    layers: str
    """The part of a name before the number of a layer."""
    groups: Sequence[Group]
    """In the order of the model."""
    whole_experts: Sequence[Group]
    """The same if ranks divide whole experts, not each expert."""

    @classmethod
    def from_lists(cls, layers: str, groups: Sequence[Any]) -> FamilyRows:
        """From the lists of the file: [stages, [[parameter, way, tensors ...], ...]]."""
        plain: list[Group] = []
        whole_experts: list[Group] = []
        for stages, lists in groups:
            rows: list[LayerRow] = []
            whole: list[LayerRow] = []
            for name, way, *tensors in lists:
                rows.append((name, WAYS[way], tuple(tensors)))
                if is_of_experts(tensors):
                    way = "axis 0, swapped" if way.endswith("swapped") else "axis 0"
                whole.append((name, WAYS[way], tuple(tensors)))
            plain.append((stages, rows))
            whole_experts.append((stages, whole))
        return cls(layers, plain, whole_experts)

    def table(
        self, cut: Cut, *, pp_size: int, pp_rank: int, divides_experts: bool
    ) -> dict[str, LocalTensor]:
        """Return the local tensors of a pipeline stage, by vLLM's names.

        divides_experts: see `whole_experts`. ConfigError if a tensor cannot be cut.
        """
        known = shapes_by_name(cut.arch)
        is_last = pp_rank == pp_size - 1
        has_group: dict[Stages, bool] = {
            "first": pp_rank == 0,
            "ends": pp_rank == 0 or (is_last and HEAD not in known),
            "every": True,
            "layer": True,
            "last": is_last,
        }
        layers = stage_layers(cut.arch.num_layers, pp_size=pp_size, pp_rank=pp_rank)
        result: dict[str, LocalTensor] = {}
        for stages, rows in self.whole_experts if divides_experts else self.groups:
            if not has_group[stages]:
                continue
            prefixes = [""]
            if stages == "layer":
                prefixes = [f"{self.layers}{number}." for number in layers]
            for prefix in prefixes:
                for name, way, below in rows:
                    names = [prefix + each for each in below]
                    if names[0] in known:
                        result[prefix + name] = way(cut, names)
        return result


def is_of_experts(tensors: Sequence[str]) -> bool:
    """Whether tensors below a layer are those of all its routed experts, fused."""
    return all(".experts." in name for name in tensors)


@lru_cache(maxsize=1)
def read_recordings() -> Mapping[str, FamilyRows]:
    """The rows of each recorded family, by model_type."""
    content = json.loads(RECORDS.read_text(encoding="utf-8"))
    result: dict[str, FamilyRows] = {}
    for recording in content["recordings"]:
        rows = FamilyRows.from_lists(recording["layers"], recording["groups"])
        result |= dict.fromkeys(recording["families"], rows)
    return result


def rows_of_family(arch: Architecture) -> FamilyRows:
    """Return the rows of an architecture; ConfigError unless `is_recorded`."""
    missing = _find_missing_row(arch)
    if missing:
        raise ConfigError.of(
            "vllm",
            f"a {arch.family} model with {missing}",
            "one whose tensors were all recorded",
            f"set actor.rollout.engine={generator_names()[0]} or choose another model",
        )
    return read_recordings()[arch.family]


def is_recorded(arch: Architecture) -> bool:
    """Whether vLLM's rows for all tensors of an architecture are known.

    Tensors of one without a table must have been read (`folder.with_tensors`), if its family is
    recorded.
    """
    return not _find_missing_row(arch)


@lru_cache(maxsize=64)
def _find_missing_row(arch: Architecture) -> str:
    """The first tensor that has no row; "" if all have one. Adapters need none."""
    family = read_recordings().get(arch.family)
    if family is None:
        return "no recorded rows"
    names = set[str]()
    for stages, rows in family.groups:
        prefix = family.layers + "*." if stages == "layer" else ""
        for _, _, tensors in rows:
            names |= {prefix + name for name in tensors}
    for name in shapes_by_name(arch):
        number, _, below = name.removeprefix(family.layers).partition(".")
        pattern = f"{family.layers}*.{below}" if number.isdecimal() else name
        if pattern not in names and not is_adapter(name):
            return f"the tensor {name}"
    return ""
