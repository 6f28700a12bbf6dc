"""Proof that a plan of weights brings every rank what it lacks, once. Pure functions on boxes.

It looks at what ranks have, need, keep and receive, box by box of each tensor, and shares no step
with the planner (`hybrid_engine.reshard`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from spmdflow.blocks.box import Box, disjoint, subtract_all
from spmdflow.hybrid_engine.reshard import BoxesByRank, ReshardPlan
from spmdflow.plan.record import Finding

Boxes = tuple[Box, ...]
Arrivals = dict[tuple[int, str], list[tuple[int, Box]]]
"""Sources and boxes by (destination, tensor)."""

_SHOWN = 5
_MISSING, _TWICE, _THERE, _STRANGE, _FALSE = "missing", "twice", "there", "strange", "false"


@dataclass(frozen=True)
class Copies:
    """A plan of boxes, and what it was made from."""

    plan: ReshardPlan
    have: BoxesByRank
    need: BoxesByRank


def check_weights(copies: Copies, *, way: str) -> list[Finding]:
    """What a rank needs of each tensor is what it has and keeps, and what it receives, once.

    Also: a source has what it sends, and nothing is sent that is there or not needed. way: how
    messages name it, such as "actor to generator".
    """
    found: list[Finding] = []
    for text in _faults(copies.plan, copies.have, copies.need, _arrivals(copies.plan)):
        found.append(Finding("weights", f"{way}: {text}; derive the plan again"))
        if len(found) == _SHOWN:
            break
    return found


def _arrivals(plan: ReshardPlan) -> Arrivals:
    found: Arrivals = {}
    for bucket in plan.buckets:
        for message in bucket.messages:
            for part in message.parts:
                for rank in message.destinations:
                    found.setdefault((rank, part.name), []).append((message.source, part.box))
    return found


def _faults(
    plan: ReshardPlan, have: BoxesByRank, need: BoxesByRank, arriving: Arrivals
) -> Iterator[str]:
    for message in (message for bucket in plan.buckets for message in bucket.messages):
        for part in message.parts:
            if _lacking(part.box, _boxes(have, message.source, part.name)):
                yield (
                    f"edge {message.source} -> {message.destinations[0]}: got {part.box.bounds} of "
                    f"{part.name}, which the source does not have, expected a source that has it"
                )
    kept: dict[tuple[int, str], list[Box]] = {}
    for rank, parts in plan.kept.items():
        for part in parts:
            kept.setdefault((rank, part.name), []).append(part.box)
    named = [(rank, name) for rank in sorted(need) for name in need[rank]]
    strange = sorted({*arriving, *kept} - set(named))
    for rank, name in [*named, *strange]:
        comes = arriving.get((rank, name), [])
        fault = _fault_of(
            _boxes(need, rank, name),
            _boxes(have, rank, name),
            tuple(kept.get((rank, name), ())),
            tuple(box for _, box in comes),
        )
        if fault is not None:
            yield _told(*fault, rank, name, comes, have)


def _boxes(boxes: BoxesByRank, rank: int, name: str) -> Boxes:
    return tuple(boxes.get(rank, {}).get(name, ()))


@lru_cache(maxsize=4096)
def _lacking(box: Box, held: Boxes) -> bool:
    return bool(subtract_all([box], held))


@lru_cache(maxsize=4096)
def _fault_of(need: Boxes, held: Boxes, kept: Boxes, comes: Boxes) -> tuple[str, Box] | None:
    """The first fault of one tensor on one rank, and its box; layers of a stage ask the same."""
    for place, box in enumerate(comes):
        if any(box.intersect(other) for other in comes[:place]):
            return _TWICE, box
        if any(box.intersect(other) for other in held):
            return _THERE, box
        if subtract_all([box], need):
            return _STRANGE, box
    for box in kept:
        if subtract_all([box], held) or subtract_all([box], need):
            return _FALSE, box
    missing = subtract_all(disjoint(need), [*kept, *comes])
    return (_MISSING, missing[0]) if missing else None


def _told(
    fault: str,
    box: Box,
    rank: int,
    name: str,
    comes: Sequence[tuple[int, Box]],
    have: BoxesByRank,
) -> str:
    where = f"{box.bounds} of {name}"
    if fault == _MISSING:
        either = " or ".join(map(str, _holders(box, name, rank, have))) or "?"
        return f"edge {either} -> {rank}: got no {where}, expected it before the generation"
    if fault == _FALSE:
        return f"rank {rank}: keeps {where}, expected a box that it has and needs"
    senders = [source for source, other in comes if other.intersect(box)]
    what = {
        _TWICE: "twice, expected each element once",
        _THERE: "which is there already, expected only what is missing",
        _STRANGE: "which is not needed there, expected only what is needed",
    }[fault]
    return f"edge {senders[-1]} -> {rank}: got {where} {what}"


def _holders(box: Box, name: str, rank: int, have: BoxesByRank) -> list[int]:
    """Other ranks that have all of a box; where there are none: that have a part of it."""
    others = [other for other in sorted(have) if other != rank]
    whole = [other for other in others if not _lacking(box, _boxes(have, other, name))]
    return whole or [
        other for other in others if any(box.intersect(held) for held in _boxes(have, other, name))
    ]
