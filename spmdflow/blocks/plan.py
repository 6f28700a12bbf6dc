"""`redistribute`: which box goes from which rank to which, for boxes of any dimension.

The index space is divided into cells. All elements of a cell are held by the same ranks and lacked
by the same ranks, so a cell is planned once. Cells with the same possible senders form a class. The
boxes of a class, in the order (destination, box), are cut into one stretch per sender, sized to
level the senders' loads (in whole slabs along the first dimension that can be cut). With
`through_nodes`, an element that several ranks of a node lack is sent to one, which passes it on.
Integers only; a second function moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

from spmdflow.blocks.box import Bounds, Box, disjoint, merged, subtract_all
from spmdflow.errors import PlanError


@dataclass(frozen=True, order=True)
class Move:
    """`source` sends the elements of `box` to every destination."""

    source: int
    box: Box
    destinations: tuple[int, ...]
    """Ascending; the source is not among them."""


@dataclass(frozen=True)
class Plan:
    """What is sent, and what stays where it is."""

    moves: tuple[Move, ...]
    """Sorted."""
    kept: Mapping[int, tuple[Box, ...]]
    """By rank: disjoint boxes that the rank needs and has. Every rank of `need` is there."""


Some = TypeVar("Some")
"""Elements: a box, or ids of rows."""
Senders = tuple[int, ...]
Classes = Mapping[Senders, Sequence[tuple[int, Some]]]
"""By possible senders: each destination and what it lacks, in order."""
Ranks = tuple[int, ...]
BoxesOf = Mapping[int, Sequence[Box]]
"""Boxes of one index space by rank; boxes of one rank may overlap."""


def redistribute(have: BoxesOf, need: BoxesOf, *, node_of: NodeOf | None = None) -> Plan:
    """Plan that brings every rank the elements it needs and lacks, each exactly once.

    Holders on the destination's node are preferred; among equals the load is levelled. PlanError
    if no rank holds a needed element.
    """
    classes: dict[Senders, dict[Ranks, list[Box]]] = {}
    for boxes, holders, lackers in _cells(have, need):
        for senders, ranks in _by_senders(holders, lackers, node_of).items():
            classes.setdefault(senders, {}).setdefault(ranks, []).extend(boxes)
    loads = dict.fromkeys(have, 0)
    moves: list[Move] = []
    shared: dict[Senders, list[tuple[int, Box]]] = {}
    for senders, lacking in classes.items():
        if len(senders) > 1:
            shared[senders] = _stretches(lacking)
            continue
        for ranks, boxes in lacking.items():
            moves += [Move(senders[0], box, ranks) for box in merged(boxes)]
            loads[senders[0]] += len(ranks) * sum(box.size for box in boxes)
    for sent in share_classes(shared, loads, _take, lambda box: box.size):
        to: dict[tuple[int, Box], list[int]] = {}
        for (source, rank), parts in sent.items():
            for box in merged(parts):
                to.setdefault((source, box), []).append(rank)
        moves += [Move(source, box, tuple(sorted(ranks))) for (source, box), ranks in to.items()]
    kept = {}
    for rank in sorted(need):
        kept[rank] = _kept(tuple(need[rank]), tuple(have.get(rank, ())))
    return Plan(tuple(sorted(moves)), kept)


def through_nodes(have: BoxesOf, need: BoxesOf, *, node_of: NodeOf) -> tuple[Plan, Plan]:
    """`redistribute` in two rounds, so that elements from other nodes enter a node once.

    Ranks of a node that lack the same elements, which no rank there holds, are a team. In the first
    round each member receives a part of them; in the second the members exchange their parts.
    """
    teams: dict[Ranks, list[Box]] = {}
    for boxes, holders, lackers in _cells(have, need):
        near = {node_of(rank) for rank in holders}
        by_node: dict[int, list[int]] = {}
        for rank in lackers:
            by_node.setdefault(node_of(rank), []).append(rank)
        for node, ranks in by_node.items():
            if len(ranks) > 1 and node not in near:
                teams.setdefault(tuple(ranks), []).extend(boxes)
    passed: list[Move] = []
    first: dict[int, list[Box]] = {rank: list(boxes) for rank, boxes in need.items()}
    for team, boxes in sorted(teams.items()):
        whole = merged(boxes)
        for rank in team:
            first[rank] = subtract_all(disjoint(first[rank]), whole)
        everyone = {team: [(team[0], box) for box in whole]}
        for sent in share_classes(everyone, dict.fromkeys(team, 0), _take, lambda box: box.size):
            for (rank, _), parts in sent.items():
                first[rank] += parts
                others = tuple(other for other in team if other != rank)
                passed += [Move(rank, box, others) for box in merged(parts)]
    return redistribute(have, first, node_of=node_of), Plan(tuple(sorted(passed)), {})


def share_classes(
    classes: Classes[Some],
    loads: dict[int, int],
    take: Callable[[Some, int], tuple[Some | None, Some | None]],
    size_of: Callable[[Some], int],
) -> Iterator[dict[tuple[int, int], list[Some]]]:
    """For each class, fewest senders first, yields (source, destination) -> pieces to send.

    A class's pieces, in order, are cut into one stretch per sender, sized to level the loads.
    loads: elements that each rank sends so far; updated. take(piece, count): (about `count`
    elements of the piece, the remainder); None for an empty one.
    """
    for senders in sorted(classes, key=lambda senders: (len(senders), senders)):
        sizes = [size_of(some) for _, some in classes[senders]]
        ends = list(accumulate(share_out([loads[rank] for rank in senders], sum(sizes))))
        sent: dict[tuple[int, int], list[Some]] = {}
        sender = 0
        done = 0
        for destination, whole in classes[senders]:
            rest: Some | None = whole
            while rest is not None:
                while sender + 1 < len(senders) and done >= ends[sender]:
                    sender += 1
                taken, rest = take(rest, ends[sender] - done)
                if taken is None:
                    sender += 1
                    continue
                source = senders[sender]
                size = size_of(taken)
                sent.setdefault((source, destination), []).append(taken)
                loads[source] += size
                done += size
        yield sent


def _take(box: Box, room: int) -> tuple[Box | None, Box | None]:
    """(about `room` elements of a box, the remainder), in whole slabs; None for an empty one."""
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


def _stretches(lacking: Mapping[Ranks, Sequence[Box]]) -> list[tuple[int, Box]]:
    """What each rank lacks of a class, in the order (destination, box)."""
    found: dict[int, list[Box]] = {}
    for ranks, boxes in lacking.items():
        for rank in ranks:
            found.setdefault(rank, []).extend(boxes)
    stretches = []
    for rank in sorted(found):
        for box in merged(found[rank]):
            stretches.append((rank, box))
    return stretches


@lru_cache(maxsize=4096)
def _kept(needed: Boxes, held: Boxes) -> Boxes:
    wanted = disjoint(needed)
    return tuple(merged(subtract_all(wanted, subtract_all(wanted, held))))


def _cells(have: BoxesOf, need: BoxesOf) -> Iterator[tuple[list[Box], Ranks, Ranks]]:
    """(disjoint boxes, who holds them, who needs and lacks them), ranks ascending.

    PlanError if no rank holds a lacked element.
    """
    ranks_of: dict[tuple[bool, Box], list[int]] = {}
    for is_held, side in ((True, have), (False, need)):
        for rank in sorted(side):
            for box in dict.fromkeys(side[rank]):
                if box.size:
                    ranks_of.setdefault((is_held, box), []).append(rank)
    keys = list(ranks_of)
    cells: dict[Ranks, list[Box]] = {}
    for bounds, places in _sweep([(key[1].bounds, place) for place, key in enumerate(keys)]):
        cells.setdefault(places, []).append(Box(bounds))
    for places, boxes in cells.items():
        sides: tuple[set[int], set[int]] = (set(), set())
        for place in places:
            sides[keys[place][0]].update(ranks_of[keys[place]])
        needing, holding = sides
        lackers = needing - holding
        if not lackers:
            continue
        if not holding:
            box = merged(boxes)[0]
            where = f"rank {min(lackers)}"
            got = f"box {box.bounds} ({box.size} elements) that no rank holds"
            raise PlanError.of(where, got, "a holder", "add it to what ranks have")
        yield boxes, tuple(sorted(holding)), tuple(sorted(lackers))


def _sweep(
    boxes: Sequence[tuple[Bounds, int]], before: Bounds = ()
) -> Iterator[tuple[Bounds, Ranks]]:
    """Bounds of disjoint cells that make up all boxes, and which boxes each lies in."""
    if not boxes[:1] or not boxes[0][0]:
        if boxes:
            yield before, tuple(place for _, place in boxes)
        return
    starting: dict[int, list[tuple[Bounds, int]]] = {}
    ending: dict[int, list[int]] = {}
    for ((start, stop), *rest), place in boxes:
        starting.setdefault(start, []).append((tuple(rest), place))
        ending.setdefault(stop, []).append(place)
    inside: dict[int, Bounds] = {}
    for low, high in pairwise(sorted({*starting, *ending})):
        for place in ending.get(low, ()):
            del inside[place]
        inside |= {place: rest for rest, place in starting.get(low, ())}
        here = [(inside[place], place) for place in sorted(inside)]
        yield from _sweep(here, (*before, (low, high)))


def _by_senders(holders: Ranks, lackers: Ranks, node_of: NodeOf | None) -> Mapping[Senders, Ranks]:
    """Who may send to which of those that lack a cell."""
    if node_of is None:
        return {holders: lackers}
    near: dict[int, list[int]] = {}
    for rank in holders:
        near.setdefault(node_of(rank), []).append(rank)
    found: dict[Senders, list[int]] = {}
    for rank in lackers:
        found.setdefault(tuple(near.get(node_of(rank), holders)), []).append(rank)
    result = {}
    for senders, ranks in found.items():
        result[senders] = tuple(ranks)
    return result


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
    filled = 0
    num_receivers = 0
    for place in order:
        # elements that raise all receivers so far to this load
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
MISSING = "missing"
TWICE = "twice"
THERE = "there"
STRANGE = "strange"
FALSE = "false"
"""What `find_cover_error` finds: nobody sends it, sent twice, sent where it is already, sent where
it is not needed, kept though not held and needed once."""


@lru_cache(maxsize=4096)
def find_cover_error(
    need: Boxes, held: Boxes, kept: Boxes, arriving: Boxes
) -> tuple[str, Box] | None:
    """What is wrong with the boxes of one tensor on one rank, and the first such box; else None.

    What the rank needs must be what it keeps of what it held, and what arrives, each element once.
    Checked from this definition alone: shares only the algebra of `Box` with `redistribute`.
    Cached, because the layers of a model repeat the same arguments.
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
    if missing:
        return (MISSING, missing[0])
    return None


_READER = -1


@lru_cache(maxsize=4096)
def plan_reads(held: Boxes, needed: Boxes) -> tuple[tuple[int, Box], ...]:
    """(place in held, part of that box): `redistribute` for one reader that holds nothing of what
    lies in files. Each needed element once, proved by `find_cover_error`.

    PlanError if nobody holds one. Cached, because the layers of a model repeat the arguments.
    """
    plan = redistribute({place: (box,) for place, box in enumerate(held)}, {_READER: needed})
    reads = tuple((move.source, move.box) for move in plan.moves)
    error = find_cover_error(needed, (), (), tuple(part for _, part in reads))
    assert error is None, (error, held, needed)
    assert all(held[place].contains(part) for place, part in reads), (reads, held)
    return reads
