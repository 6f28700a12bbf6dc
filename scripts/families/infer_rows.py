"""Rows of `spmdflow.weights.recorded` that reproduce the tables which vLLM's loader gave.

Pure: a family's observations are tables of ranks, with the sizes of the model and of the layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import VLLM_VOCAB_MULTIPLE
from spmdflow.weights.recorded import HEAD, WAYS, FamilyRows, Stages, is_of_experts
from spmdflow.weights.table import Cut, LocalTensor, ShardTable, shapes_by_name

_LAYER = re.compile(r"^(.*?\.)\d+\.")
"""A name of a layer's tensor; the group is what precedes the layer's number."""
Row = tuple[str, ...]
"""Parameter and tensors, below their layer."""
Groups = list[tuple[Stages, list[list[str]]]]
"""The rows of a family as in the file."""


class NoRowError(Exception):
    """A parameter that no way reproduces; the message says which."""


@dataclass(frozen=True)
class Observation:
    """What vLLM's loader gave one rank of a replica."""

    arch: Architecture
    """With its tensors."""
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    divides_experts: bool
    table: ShardTable

    @property
    def cut(self) -> Cut:
        """The rank's share of the architecture."""
        return Cut("vllm", self.arch, self.tp_size, self.tp_rank, VLLM_VOCAB_MULTIPLE)

    @property
    def is_last(self) -> bool:
        """Whether the rank is of the last stage."""
        return self.pp_rank == self.pp_size - 1


class Example(NamedTuple):
    """A parameter in an observation."""

    seen: Observation
    prefix: str
    """Of its layer; "": it is in none."""
    local: LocalTensor
    """Without pieces if the rank has nothing but padding."""


def infer_rows(observations: Sequence[Observation]) -> tuple[str, Groups]:
    """Return the part of a name before a layer's number, and the rows of one family.

    NoRowError if no rows reproduce all observations, box by box and nothing else.
    """
    (layers,) = {prefix for each in observations for prefix in _prefixes(each.table)}
    examples: dict[Row, list[Example]] = {}
    empty: dict[str, list[Example]] = {}
    order: list[Row] = []
    for each in observations:
        position = 0
        for name, local in each.table.items():
            row, prefix = _row_of(name, local, layers)
            example = Example(each, prefix, local)
            if len(row) == 1:
                empty.setdefault(row[0], []).append(example)
                continue
            if row not in examples:
                order.insert(position, row)
            position = order.index(row) + 1
            examples.setdefault(row, []).append(example)
    groups: Groups = []
    for row in order:
        name, *tensors = row
        stages: Stages = "layer"
        if examples[row][0].prefix == "":
            stages = _stages_of(row, observations)
        if not groups or groups[-1][0] != stages:
            groups.append((stages, []))
        way = _way_of(row, [*examples[row], *empty.get(name, ())])
        groups[-1][1].append([name, way, *tensors])
    check_rows(FamilyRows.from_lists(layers, groups), observations)
    return layers, groups


def check_rows(rows: FamilyRows, observations: Iterable[Observation]) -> None:
    """NoRowError unless the rows reproduce all tables, box by box."""
    for each in observations:
        table = rows.table(
            each.cut,
            pp_size=each.pp_size,
            pp_rank=each.pp_rank,
            divides_experts=each.divides_experts,
        )
        for name in table.keys() | each.table.keys():
            if name not in table or name not in each.table:
                raise NoRowError(f"{name} is not in both tables of {_describe(each)}")
            if not table[name].has_elements_of(each.table[name]):
                raise NoRowError(f"{name} has other boxes in {_describe(each)}")


def _describe(each: Observation) -> str:
    """Rank and layout of an observation, for messages."""
    experts = "e" if each.divides_experts else ""
    layout = f"t{each.tp_size}{experts}p{each.pp_size}"
    return f"{each.arch.family} on {layout}, rank {each.tp_rank} of stage {each.pp_rank}"


def _prefixes(table: ShardTable) -> set[str]:
    """What precedes the number in the names of layers' parameters."""
    return {match[1] for name in table if (match := _LAYER.match(name))}


def _row_of(name: str, local: LocalTensor, layers: str) -> tuple[Row, str]:
    """Return parameter and tensors below their layer, and the layer's prefix ("": in none)."""
    prefix = ""
    if name.startswith(layers):
        number = name.removeprefix(layers).partition(".")[0]
        prefix = f"{layers}{number}."
    pieces = sorted(local.pieces, key=lambda piece: piece.local.bounds)
    tensors = dict.fromkeys(piece.name.removeprefix(prefix) for piece in pieces)
    return (name.removeprefix(prefix), *tensors), prefix


def _way_of(row: Row, examples: Sequence[Example]) -> str:
    """Return the first way that gives the row's parameter in all examples.

    Of whole experts, only whether they are swapped is known; the other examples determine the way.
    """
    for name, way in WAYS.items():
        for each, prefix, local in examples:
            if each.divides_experts and is_of_experts(row[1:]):
                continue
            try:
                made = way(each.cut, [prefix + tensor for tensor in row[1:]])
            except (ConfigError, IndexError, ValueError):
                break
            if not made.has_elements_of(local):
                break
        else:
            return name
    raise NoRowError(f"no way gives {row[0]} from {', '.join(row[1:])}")


def _stages_of(row: Row, observations: Sequence[Observation]) -> Stages:
    """Return the pipeline stages that have the parameter of a row that is in no layer."""
    name, tensor = row[:2]
    having: dict[tuple[bool, int], bool] = {}
    for each in observations:
        known = shapes_by_name(each.arch)
        if each.pp_size == 3 and tensor in known:
            having[HEAD not in known, each.pp_rank] = name in each.table
    kinds: Mapping[Stages, Sequence[bool]] = {
        "first": (True, False, False, True, False, False),
        "last": (False, False, True, False, False, True),
        "ends": (True, False, False, True, False, True),
        "every": (True, True, True, True, True, True),
    }
    for stages, expected in kinds.items():
        models_and_stages = [(is_tied, rank) for is_tied in (False, True) for rank in range(3)]
        wanted = dict(zip(models_and_stages, expected, strict=True))
        if all(wanted[one] == has for one, has in having.items()):
            return stages
    raise NoRowError(f"{name} is on stages {having}")
