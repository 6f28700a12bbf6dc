"""`verify`, `verify_rows`: whether a plan does what it promises, from the definitions alone.

A right plan sends what is lacking exactly once, from ranks that hold it, nothing that is already
there, in the canonical order. The last check is that the plan is the one that every rank derives
from the same facts: of several right plans only that one avoids a deadlock. Levelled loads and
the choice of near senders are part of that last check only. Shares no step with the planners
before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spmdflow.blocks.box import Box, disjoint
from spmdflow.blocks.plan import Edge, NodeOf, Plan, PlanError, redistribute
from spmdflow.blocks.rows import Ids, RowEdge, redistribute_rows

Boxes = np.ndarray
"""(boxes, dims, 2) int64: start and stop of each dimension."""

_NO_BOXES = np.zeros((0, 0, 2), dtype=np.int64)


def verify(
    plan: Plan,
    have: Mapping[int, Sequence[Box]],
    need: Mapping[int, Sequence[Box]],
    *,
    node_of: NodeOf | None = None,
) -> None:
    """PlanError with the exact fault unless plan is right for have and need."""
    _check_order([(edge.source, edge.destination, edge.box.bounds) for edge in plan.edges])
    held = {rank: _array(disjoint(boxes)) for rank, boxes in have.items()}
    wanted = {rank: _array(disjoint(boxes)) for rank, boxes in need.items()}
    _require(set(plan.kept) == set(need), "kept", sorted(plan.kept), sorted(need))
    for edge in plan.edges:
        _check_edge(edge, held, wanted)
    received: dict[int, list[Box]] = {}
    for edge in plan.edges:
        received.setdefault(edge.destination, []).append(edge.box)
    for rank, boxes in wanted.items():
        arrives, stays = _array(received.get(rank, [])), _array(plan.kept[rank])
        _check_cover(rank, arrives, stays, boxes, held.get(rank, _NO_BOXES))
    derived = redistribute(have, need, node_of=node_of).edges
    if plan.edges != derived:
        _refuse_other(plan.edges, derived)


def verify_rows(
    edges: Sequence[RowEdge],
    have: Mapping[int, Ids],
    need: Mapping[int, Ids],
    *,
    node_of: NodeOf | None = None,
) -> None:
    """PlanError with the exact fault unless the edges are right for have and need."""
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


def _check_edge(edge: Edge, held: Mapping[int, Boxes], wanted: Mapping[int, Boxes]) -> None:
    name = f"edge {edge.source} -> {edge.destination}, box {edge.box.bounds}"
    size, box = edge.box.size, _array([edge.box])[0]
    _require(size > 0, f"{name}: elements", size, "at least 1")
    _require(edge.source != edge.destination, f"{name}: source", edge.source, "another rank")
    at_source = _common(box, held.get(edge.source, _NO_BOXES))
    _require(at_source == size, f"{name}: elements that the source holds", at_source, size)
    there = _common(box, held.get(edge.destination, _NO_BOXES))
    _require(there == 0, f"{name}: elements that are already there", there, 0)
    needed = _common(box, wanted.get(edge.destination, _NO_BOXES))
    _require(needed == size, f"{name}: elements that are needed", needed, size)


def _check_cover(rank: int, received: Boxes, kept: Boxes, wanted: Boxes, held: Boxes) -> None:
    """Disjoint boxes inside what is wanted, with as many elements: that is an exact cover."""
    for what, boxes in (("received", received), ("kept", kept)):
        for place, box in enumerate(boxes):
            twice = _common(box, boxes[:place])
            _require(twice == 0, f"rank {rank}: elements of {_text(box)} {what} twice", twice, 0)
    for box in kept:
        ours, size = min(_common(box, wanted), _common(box, held)), _size(box)
        _require(ours == size, f"rank {rank}: kept of {_text(box)}, held and needed", ours, size)
    right = sum(_common(box, held) for box in wanted)
    stays, arrives = sum(map(_size, kept)), sum(map(_size, received))
    _require(stays == right, f"rank {rank}: elements kept", stays, right)
    lacking = sum(map(_size, wanted)) - right
    _require(arrives == lacking, f"rank {rank}: elements received", arrives, lacking)


def _array(boxes: Sequence[Box]) -> Boxes:
    if not boxes:
        return _NO_BOXES
    bounds = np.array([box.bounds for box in boxes], dtype=np.int64)
    return bounds.reshape(len(boxes), len(boxes[0].bounds), 2)


def _common(box: np.ndarray, boxes: Boxes) -> int:
    """Elements that a box (dims, 2) has in common with disjoint boxes."""
    if not len(boxes):
        return 0
    starts = np.maximum(box[:, 0], boxes[..., 0])
    stops = np.minimum(box[:, 1], boxes[..., 1])
    return int(np.clip(stops - starts, 0, None).prod(axis=1).sum())


def _size(box: np.ndarray) -> int:
    return int((box[:, 1] - box[:, 0]).prod())


def _text(box: np.ndarray) -> str:
    return str(box.tolist())


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
