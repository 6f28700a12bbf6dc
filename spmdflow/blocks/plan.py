"""`redistribute`: which box goes from which rank to which, for boxes of any dimension.

What a rank lacks is split into pieces that the same ranks hold whole. Pieces with the same
possible senders form a class; in the order (destination, box) a class is cut into one stretch
for each sender, as long as levels the senders' loads (to a slab along the first dimension that
can be cut). Integers only; a second function moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from spmdflow.blocks.box import Box, disjoint, merged, subtract_all
from spmdflow.errors import PlanError


@dataclass(frozen=True, order=True)
class Edge:
    """`source` sends the elements of `box` to `destination`."""

    source: int
    destination: int
    box: Box


@dataclass(frozen=True)
class Plan:
    """What is sent, and what stays where it is."""

    edges: tuple[Edge, ...]
    """Sorted by source, destination, box."""
    kept: Mapping[int, tuple[Box, ...]]
    """By rank: disjoint boxes that the rank needs and has. Every rank of `need` is there."""


Some = TypeVar("Some")
"""Elements: a box, or ids of rows."""
Senders = tuple[int, ...]
Classes = Mapping[Senders, Sequence[tuple[int, Some]]]
"""By possible senders: each destination and what it lacks, in order."""


def redistribute(
    have: Mapping[int, Sequence[Box]],
    need: Mapping[int, Sequence[Box]],
    *,
    node_of: NodeOf | None = None,
) -> Plan:
    """Plan that brings every rank the elements it needs and lacks, each exactly once.

    have, need: boxes of one index space by rank; boxes of one rank may overlap. Holders on the
    destination's node are preferred; among equals the load is levelled. PlanError if a needed
    element is with no rank.
    """
    pieces = _Pieces(have)
    classes: dict[Senders, list[tuple[int, Box]]] = {}
    kept: dict[int, tuple[Box, ...]] = {}
    for destination in sorted(need):
        wanted, held = disjoint(need[destination]), have.get(destination, ())
        lacking = subtract_all(wanted, held)
        kept[destination] = tuple(merged(subtract_all(wanted, lacking)))
        for senders, boxes in pieces.by_senders(destination, lacking, node_of).items():
            stretches = [(destination, box) for box in merged(boxes)]
            classes.setdefault(senders, []).extend(stretches)
    edges = [
        Edge(*pair, box)
        for sent in share_classes(classes, have, _take, lambda box: box.size)
        for pair, boxes in sent.items()
        for box in merged(boxes)
    ]
    return Plan(tuple(sorted(edges)), kept)


def share_classes(
    classes: Classes[Some],
    ranks: Iterable[int],
    take: Callable[[Some, int], tuple[Some | None, Some | None]],
    size_of: Callable[[Some], int],
) -> Iterator[dict[tuple[int, int], list[Some]]]:
    """Of each class, those with fewest senders first: (source, destination) -> what is sent.

    The stretches of a class, in order, are cut into about as much for each sender as levels the
    loads. take: (about so many elements, the rest); None for nothing.
    """
    loads = dict.fromkeys(ranks, 0)
    for senders in sorted(classes, key=lambda senders: (len(senders), senders)):
        sizes = [size_of(some) for _, some in classes[senders]]
        ends = list(accumulate(share_out([loads[rank] for rank in senders], sum(sizes))))
        sent: dict[tuple[int, int], list[Some]] = {}
        sender, done = 0, 0
        for destination, whole in classes[senders]:
            rest: Some | None = whole
            while rest is not None:
                while sender + 1 < len(senders) and done >= ends[sender]:
                    sender += 1
                taken, rest = take(rest, ends[sender] - done)
                if taken is None:
                    sender += 1
                    continue
                source, size = senders[sender], size_of(taken)
                sent.setdefault((source, destination), []).append(taken)
                loads[source] += size
                done += size
        yield sent


def _take(box: Box, room: int) -> tuple[Box | None, Box | None]:
    """(about room elements of a box, the rest), in whole slabs; None for nothing."""
    if box.size <= room:
        return box, None
    dim = next(dim for dim, extent in enumerate(box.shape) if extent > 1)
    slab = box.size // box.shape[dim]
    num_slabs = (2 * room + slab) // (2 * slab)
    if num_slabs == 0:
        return None, box
    if num_slabs == box.shape[dim]:
        return box, None
    return box.cut(dim, box.bounds[dim][0] + num_slabs)


class _Pieces:
    """Splits a box by who holds it. Equal boxes of several ranks are looked at once."""

    def __init__(self, have: Mapping[int, Sequence[Box]]) -> None:
        self._holders: dict[Box, list[int]] = {}
        self._known: dict[Box, list[tuple[Box, list[int]]]] = {}
        for rank in sorted(have):
            for box in disjoint(have[rank]):
                self._holders.setdefault(box, []).append(rank)

    def by_senders(
        self, destination: int, lacking: Sequence[Box], node_of: NodeOf | None
    ) -> dict[tuple[int, ...], list[Box]]:
        """Disjoint boxes by possible senders. PlanError if nobody has some element."""
        found: dict[tuple[int, ...], list[Box]] = {}
        for box in lacking:
            if box not in self._known:
                self._known[box] = self._split(box)
            for piece, holders in self._known[box]:
                if not holders:
                    raise PlanError(
                        f"rank {destination}: got box {piece.bounds} ({piece.size} elements) "
                        f"that no rank holds, expected a holder; add it to what ranks have"
                    )
                senders = candidates(holders, destination, node_of)
                found.setdefault(senders, []).append(piece)
        return found

    def _split(self, box: Box) -> list[tuple[Box, list[int]]]:
        pieces: list[tuple[Box, list[int]]] = [(box, [])]
        for held, ranks in self._holders.items():
            if box.intersect(held) is None:
                continue
            split: list[tuple[Box, list[int]]] = []
            for piece, holders in pieces:
                common = piece.intersect(held)
                if common is not None:
                    split.append((common, holders + ranks))
                split += [(rest, holders) for rest in piece.subtract(held)]
            pieces = split
        return pieces


NodeOf = Callable[[int], int]
"""Node of a rank."""


def candidates(holders: Sequence[int], destination: int, node_of: NodeOf | None) -> tuple[int, ...]:
    """Holders on the destination's node if there are any, else all; ascending."""
    if node_of is not None:
        node = node_of(destination)
        holders = [rank for rank in holders if node_of(rank) == node] or holders
    return tuple(sorted(holders))


def share_out(loads: Sequence[int], total: int) -> list[int]:
    """Parts of total, one for each load, that make loads + parts as level as can be.

    The least loaded are filled first, like water; what does not divide goes to the first of
    them. Receivers end within 1 of one another, and no lower load than theirs is passed over.
    """
    order = sorted(range(len(loads)), key=lambda place: (loads[place], place))
    filled, num_receivers = 0, 0
    for place in order:
        # what lifts the receivers so far to this load
        if num_receivers * loads[place] - filled > total:
            break
        filled += loads[place]
        num_receivers += 1
    base, extra = divmod(total + filled, num_receivers)
    parts = [0] * len(loads)
    for number, place in enumerate(sorted(order[:num_receivers])):
        parts[place] = base - loads[place] + (number < extra)
    return parts


Boxes = tuple[Box, ...]
MISSING, TWICE, THERE, STRANGE, FALSE = "missing", "twice", "there", "strange", "false"
"""What `find_cover_error` finds: nobody sends it, sent twice, sent where it is already, sent where
it is not needed, kept though not held and needed once."""


@lru_cache(maxsize=4096)
def find_cover_error(
    need: Boxes, held: Boxes, kept: Boxes, arriving: Boxes
) -> tuple[str, Box] | None:
    """What is wrong with the boxes of one tensor on one rank, and the first such box; None: right.

    What the rank needs must be what it keeps of what it held, and what arrives, each element once.
    From this definition alone: no step is shared with `redistribute` but the algebra of boxes.
    Equal questions are answered once: the layers of a model ask the same.
    """
    for place, box in enumerate(arriving):
        if any(box.intersect(other) for other in arriving[:place]):
            return TWICE, box
        if any(box.intersect(other) for other in held):
            return THERE, box
        if subtract_all([box], need):
            return STRANGE, box
    for place, box in enumerate(kept):
        is_twice = any(box.intersect(other) for other in kept[:place])
        if is_twice or subtract_all([box], held) or subtract_all([box], need):
            return FALSE, box
    missing = subtract_all(disjoint(need), [*kept, *arriving])
    return (MISSING, missing[0]) if missing else None
