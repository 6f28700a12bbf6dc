"""`verify`, `verify_rows`: whether a plan does what it promises.

A right plan sends what is lacking exactly once, from ranks that hold it, nothing that is already
there, in the canonical order. The last check is that the plan is the one that every rank derives
from the same facts: of several right plans only that one avoids a deadlock. Levelled loads and
the choice of near senders are part of that last check only. Before it, from the definitions alone:
no step is shared with the planners but the algebra of boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.blocks.plan import (
    ALREADY_HELD,
    MISSING,
    NOT_NEEDED,
    SENT_TWICE,
    WRONGLY_RETAINED,
    NodeOf,
    Plan,
    find_cover_error,
    redistribute,
)
from spmdflow.blocks.rows import Ids, RowEdge, redistribute_rows
from spmdflow.errors import PlanError

_SAID = {
    MISSING: "that nobody sends",
    SENT_TWICE: "sent twice",
    ALREADY_HELD: "sent that is already there",
    NOT_NEEDED: "sent that is not needed",
    WRONGLY_RETAINED: "kept that is not held and needed, once",
}


@dataclass(frozen=True, order=True)
class Edge:
    """`source` sends the elements of `box` to `destination`."""

    source: int
    destination: int
    box: Box


def edges_of(plan: Plan) -> tuple[Edge, ...]:
    """One for each destination of a move, sorted by source, destination, box."""
    return tuple(sorted(Edge(m.source, to, m.box) for m in plan.moves for to in m.destinations))


class Edges(NamedTuple):
    """A plan of boxes with single edges, which a test may spoil."""

    edges: tuple[Edge, ...]
    retained: Mapping[int, tuple[Box, ...]]


def verify(
    plan: Plan | Edges,
    have: Mapping[int, Sequence[Box]],
    need: Mapping[int, Sequence[Box]],
    *,
    node_of: NodeOf | None = None,
) -> None:
    """PlanError with the exact problem unless plan is right for have and need."""
    edges = plan.edges if isinstance(plan, Edges) else edges_of(plan)
    _check_order([(edge.source, edge.destination, edge.box.bounds) for edge in edges])
    _require(set(plan.retained) == set(need), "kept", sorted(plan.retained), sorted(need))
    received: dict[int, list[Box]] = {}
    for edge in edges:
        name = f"edge {edge.source} -> {edge.destination}, box {edge.box.bounds}"
        _require(edge.box.size > 0, f"{name}: elements", edge.box.size, "at least 1")
        _require(edge.source != edge.destination, f"{name}: source", edge.source, "another rank")
        lacking = subtract_all([edge.box], have.get(edge.source, ()))
        _require(not lacking, f"{name}: boxes that the source lacks", lacking, "none")
        received.setdefault(edge.destination, []).append(edge.box)
    for rank in dict.fromkeys([*received, *need]):
        sides = (need.get(rank, ()), have.get(rank, ()), plan.retained.get(rank, ()))
        error = find_cover_error(*map(tuple, sides), tuple(received.get(rank, ())))
        if error is not None:
            what, box = error
            _require(False, f"rank {rank}: box {_SAID[what]}", box.bounds, "none")
    derived = edges_of(redistribute(have, need, node_of=node_of))
    if edges != derived:
        _refuse_other(edges, derived)


def verify_rows(
    edges: Sequence[RowEdge],
    have: Mapping[int, Ids],
    need: Mapping[int, Ids],
    *,
    node_of: NodeOf | None = None,
) -> None:
    """PlanError with the exact problem unless the edges are right for have and need."""
    _check_order([(edge.source, edge.destination) for edge in edges])
    nobody = np.zeros(0, dtype=np.int64)
    arriving: dict[int, list[Ids]] = {rank: [] for rank in need}
    for edge in edges:
        name = f"edge {edge.source} -> {edge.destination}"
        _require(edge.source != edge.destination, f"{name}: source", edge.source, "another rank")
        ascending = len(edge.ids) > 0 and bool((np.diff(edge.ids) > 0).all())
        _require(ascending, f"{name}: ids", edge.ids.tolist(), "at least one, ascending")
        strange = edge.ids[~np.isin(edge.ids, have.get(edge.source, nobody))]
        _require(not len(strange), f"{name}: rows that the source lacks", strange, "none")
        arriving.setdefault(edge.destination, []).append(edge.ids)
    for rank, parts in arriving.items():
        got = np.concatenate([nobody, *parts])
        _check_rows(rank, got, have.get(rank, nobody), need.get(rank, nobody))
    derived = redistribute_rows(have, need, node_of=node_of)
    if _plain(edges) != _plain(derived):
        _refuse_other(_plain(edges), _plain(derived))


def _check_order(keys: Sequence[tuple]) -> None:
    for place, (before, after) in enumerate(zip(keys, keys[1:], strict=False)):
        if not before < after:
            raise PlanError(
                f"plan: got edge {place + 1} {after} after {before}, expected edges in the order "
                f"of source, destination, start, each once; sort them and drop repeats"
            )


def _check_rows(rank: int, got: Ids, held: Ids, needed: Ids) -> None:
    distinct, counts = np.unique(got, return_counts=True)
    _require(not (counts > 1).any(), f"rank {rank}: rows sent twice", distinct[counts > 1], "none")
    there = np.intersect1d(distinct, held)
    _require(not len(there), f"rank {rank}: rows sent that are already there", there, "none")
    extra = np.setdiff1d(distinct, needed)
    _require(not len(extra), f"rank {rank}: rows sent that are not needed", extra, "none")
    missing = np.setdiff1d(np.setdiff1d(needed, held), distinct)
    _require(not len(missing), f"rank {rank}: rows that nobody sends", missing, "none")


def _plain(edges: Sequence[RowEdge]) -> list[tuple[int, int, bytes]]:
    return [
        (edge.source, edge.destination, np.asarray(edge.ids, np.int64).tobytes()) for edge in edges
    ]


def _require(holds: bool, what: str, got: object, expected: object) -> None:
    if not holds:
        raise PlanError(
            f"{what}: got {got}, expected {expected}; derive the plan again with redistribute"
        )


def _refuse_other(got: Sequence[object], derived: Sequence[object]) -> None:
    differing = [
        place for place, pair in enumerate(zip(got, derived, strict=False)) if pair[0] != pair[1]
    ]
    place = differing[0] if differing else min(len(got), len(derived))
    raise PlanError(
        f"plan: got another edge {place} of {len(got)} than every rank derives ({len(derived)} "
        f"edges), expected the same plan everywhere; derive it again with redistribute"
    )
