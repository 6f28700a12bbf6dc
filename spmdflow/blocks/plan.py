"""`redistribute`: which box goes from which rank to which, for boxes of any dimension.

The index space is divided into cells. All elements of a cell are held by the same ranks and lacked
by the same ranks, so a cell is planned once. Cells with the same possible senders form a class. The
boxes of a class, in the order (destination, box), are cut into one stretch per sender, sized to
level the senders' loads (in complete slabs along the first dimension that can be cut). With
`redistribute_through_nodes`, an element that several ranks of a node lack is sent to one of them,
which forwards it. Integers only; another function moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

from spmdflow.blocks.box import Bounds, Box, make_disjoint, merge_neighbours, subtract_all
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
    """What is sent, and what ranks retain."""

    moves: tuple[Move, ...]
    """Sorted."""
    retained: Mapping[int, tuple[Box, ...]]
    """By rank: disjoint boxes that the rank needs and has. It has every rank of `need`."""


Some = TypeVar("Some")
"""Elements: a box, or ids of rows."""
Senders = tuple[int, ...]
Classes = Mapping[Senders, Sequence[tuple[int, Some]]]
"""By possible senders: each destination and the elements that it lacks, in order."""
Ranks = tuple[int, ...]
BoxesOf = Mapping[int, Sequence[Box]]
"""Boxes of one index space by rank; boxes of one rank may overlap."""


def redistribute(have: BoxesOf, need: BoxesOf, *, node_of: NodeOf | None = None) -> Plan:
    """Return the plan that sends every rank the elements it needs and lacks, each exactly once.

    have, need: boxes by rank. A sender is chosen among the holders on the destination's node or, if
    there are none, among all holders. The number of elements that these send is levelled. retained
    has, by rank of need, what the rank needs and already has. PlanError if no rank holds a needed
    element.
    """
    classes: dict[Senders, dict[Ranks, list[Box]]] = {}
    for boxes, holders, lackers in _cells(have, need):
        for senders, ranks in _group_by_senders(holders, lackers, node_of).items():
            classes.setdefault(senders, {}).setdefault(ranks, []).extend(boxes)
    loads = dict.fromkeys(have, 0)
    moves: list[Move] = []
    shared: dict[Senders, list[tuple[int, Box]]] = {}
    for senders, lacking in classes.items():
        if len(senders) > 1:
            shared[senders] = _list_by_destination(lacking)
            continue
        for ranks, boxes in lacking.items():
            moves += [Move(senders[0], box, ranks) for box in merge_neighbours(boxes)]
            loads[senders[0]] += len(ranks) * sum(box.size for box in boxes)
    for sent in share_classes(shared, loads, _take, lambda box: box.size):
        to: dict[tuple[int, Box], list[int]] = {}
        for (source, rank), parts in sent.items():
            for box in merge_neighbours(parts):
                to.setdefault((source, box), []).append(rank)
        moves += [Move(source, box, tuple(sorted(ranks))) for (source, box), ranks in to.items()]
    retained = {}
    for rank in sorted(need):
        retained[rank] = _retained_boxes(tuple(need[rank]), tuple(have.get(rank, ())))
    return Plan(tuple(sorted(moves)), retained)


def redistribute_through_nodes(
    have: BoxesOf, need: BoxesOf, *, node_of: NodeOf
) -> tuple[Plan, Plan]:
    """Return a plan of two rounds, in which elements from other nodes enter a node only once.

    Otherwise like `redistribute`. Ranks of a node that lack the same elements, which no rank of
    that node holds, form a team. In the first round each member receives a part of the elements,
    and other ranks receive what they lack. In the second round each member sends its part to the
    other members; that plan has no `retained`. PlanError if no rank holds a needed element.
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
    forwards: list[Move] = []
    first: dict[int, list[Box]] = {rank: list(boxes) for rank, boxes in need.items()}
    for team, boxes in sorted(teams.items()):
        team_boxes = merge_neighbours(boxes)
        for rank in team:
            first[rank] = subtract_all(make_disjoint(first[rank]), team_boxes)
        everyone = {team: [(team[0], box) for box in team_boxes]}
        for sent in share_classes(everyone, dict.fromkeys(team, 0), _take, lambda box: box.size):
            for (rank, _), parts in sent.items():
                first[rank] += parts
                others = tuple(other for other in team if other != rank)
                forwards += [Move(rank, box, others) for box in merge_neighbours(parts)]
    return redistribute(have, first, node_of=node_of), Plan(tuple(sorted(forwards)), {})


def share_classes(
    classes: Classes[Some],
    loads: dict[int, int],
    take: Callable[[Some, int], tuple[Some | None, Some | None]],
    size_of: Callable[[Some], int],
) -> Iterator[dict[tuple[int, int], list[Some]]]:
    """Choose senders: yield {(source, destination): pieces to send} for each class.

    Classes with the fewest possible senders come first. A class's pieces, in order, are cut into
    one stretch per sender, sized so that all senders have sent as equally as possible. loads:
    number of elements that each rank sends so far; it is updated in place. take(piece, count):
    (about `count` elements of the piece, the remainder), with None for an empty part.
    """
    for senders in sorted(classes, key=lambda senders: (len(senders), senders)):
        sizes = [size_of(some) for _, some in classes[senders]]
        ends = list(accumulate(level_loads([loads[rank] for rank in senders], sum(sizes))))
        sent: dict[tuple[int, int], list[Some]] = {}
        sender = 0
        done = 0
        for destination, piece in classes[senders]:
            rest: Some | None = piece
            while rest is not None:
                while sender + 1 < len(senders) and done >= ends[sender]:
                    sender += 1
                part, rest = take(rest, ends[sender] - done)
                if part is None:
                    sender += 1
                    continue
                source = senders[sender]
                size = size_of(part)
                sent.setdefault((source, destination), []).append(part)
                loads[source] += size
                done += size
        yield sent


def _take(box: Box, room: int) -> tuple[Box | None, Box | None]:
    """Split a box into (about `room` elements, the remainder); None for an empty part.

    It is cut between complete slabs along the first dimension with more than one index. The number
    of slabs is rounded to the nearest.
    """
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


def _list_by_destination(lacking: Mapping[Ranks, Sequence[Box]]) -> list[tuple[int, Box]]:
    """Return (rank, box) for the boxes that each rank lacks, ordered by rank, then by box.

    Neighbouring boxes of a rank are joined. lacking: boxes by the ranks that lack them.
    """
    boxes_of_rank: dict[int, list[Box]] = {}
    for ranks, boxes in lacking.items():
        for rank in ranks:
            boxes_of_rank.setdefault(rank, []).extend(boxes)
    stretches = []
    for rank in sorted(boxes_of_rank):
        for box in merge_neighbours(boxes_of_rank[rank]):
            stretches.append((rank, box))
    return stretches


@lru_cache(maxsize=4096)
def _retained_boxes(needed: Boxes, available: Boxes) -> Boxes:
    disjoint_boxes = make_disjoint(needed)
    return tuple(
        merge_neighbours(subtract_all(disjoint_boxes, subtract_all(disjoint_boxes, available)))
    )


def _cells(have: BoxesOf, need: BoxesOf) -> Iterator[tuple[list[Box], Ranks, Ranks]]:
    """Yield (disjoint boxes, ranks that hold them, ranks that need and lack them).

    All elements of the boxes are held by the same ranks and lacked by the same ranks. Ranks ascend.
    Elements that no rank lacks are omitted. PlanError if no rank holds a needed element.
    """
    ranks_of: dict[tuple[bool, Box], list[int]] = {}
    for is_held, side in ((True, have), (False, need)):
        for rank in sorted(side):
            for box in dict.fromkeys(side[rank]):
                if box.size:
                    ranks_of.setdefault((is_held, box), []).append(rank)
    keys = list(ranks_of)
    cells: dict[Ranks, list[Box]] = {}
    for bounds, members in _sweep([(key[1].bounds, index) for index, key in enumerate(keys)]):
        cells.setdefault(members, []).append(Box(bounds))
    for members, boxes in cells.items():
        sides: tuple[set[int], set[int]] = (set(), set())
        for index in members:
            sides[keys[index][0]].update(ranks_of[keys[index]])
        needing, holding = sides
        lackers = needing - holding
        if not lackers:
            continue
        if not holding:
            box = merge_neighbours(boxes)[0]
            where = f"rank {min(lackers)}"
            got = f"box {box.bounds} ({box.size} elements) that no rank holds"
            raise PlanError.of(where, got, "a holder", "add it to what ranks have")
        yield boxes, tuple(sorted(holding)), tuple(sorted(lackers))


def _sweep(
    boxes: Sequence[tuple[Bounds, int]], before: Bounds = ()
) -> Iterator[tuple[Bounds, Ranks]]:
    """Yield (bounds of a cell, indices of the boxes that contain it), ascending.

    The cells are disjoint and cover all boxes; no boundary of a box lies inside a cell. boxes:
    (bounds, index). before: bounds in earlier dimensions, for the recursion over dimensions.
    """
    if not boxes[:1] or not boxes[0][0]:
        if boxes:
            yield before, tuple(index for _, index in boxes)
        return
    starting: dict[int, list[tuple[Bounds, int]]] = {}
    ending: dict[int, list[int]] = {}
    for ((start, stop), *rest), index in boxes:
        starting.setdefault(start, []).append((tuple(rest), index))
        ending.setdefault(stop, []).append(index)
    inside: dict[int, Bounds] = {}
    for low, high in pairwise(sorted({*starting, *ending})):
        for index in ending.get(low, ()):
            del inside[index]
        inside |= {index: rest for rest, index in starting.get(low, ())}
        here = [(inside[index], index) for index in sorted(inside)]
        yield from _sweep(here, (*before, (low, high)))


def _group_by_senders(
    holders: Ranks, lackers: Ranks, node_of: NodeOf | None
) -> Mapping[Senders, Ranks]:
    """Group the ranks that lack a cell by the ranks that may send it: {senders: lackers}.

    Senders are the holders on the lacking rank's node or, if there are none, all holders. Without
    node_of they are always all holders.
    """
    if node_of is None:
        return {holders: lackers}
    near: dict[int, list[int]] = {}
    for rank in holders:
        near.setdefault(node_of(rank), []).append(rank)
    ranks_by_senders: dict[Senders, list[int]] = {}
    for rank in lackers:
        ranks_by_senders.setdefault(tuple(near.get(node_of(rank), holders)), []).append(rank)
    result = {}
    for senders, ranks in ranks_by_senders.items():
        result[senders] = tuple(ranks)
    return result


NodeOf = Callable[[int], int]
"""Node of a rank."""


def candidates(holders: Sequence[int], destination: int, node_of: NodeOf | None) -> tuple[int, ...]:
    """Return the holders on the destination's node, or all holders if there are none; ascending.

    Without node_of: all holders.
    """
    if node_of is not None:
        node = node_of(destination)
        holders = [rank for rank in holders if node_of(rank) == node] or holders
    return tuple(sorted(holders))


def level_loads(loads: Sequence[int], total: int) -> list[int]:
    """Divide total into one part per load, so that loads + parts are as equal as possible.

    The lowest loads are filled up first. Loads that receive a part end within 1 of one another, and
    no lower load remains. If total does not divide evenly, the first of these get one more. The
    parts are in the order of loads and add up to total; a load that is too high gets 0.
    """
    order = sorted(range(len(loads)), key=lambda index: (loads[index], index))
    filled = 0
    num_receivers = 0
    for index in order:
        # elements that raise all receivers so far to this load
        if num_receivers * loads[index] - filled > total:
            break
        filled += loads[index]
        num_receivers += 1
    base, extra = divmod(total + filled, num_receivers)
    parts = [0] * len(loads)
    for number, index in enumerate(sorted(order[:num_receivers])):
        parts[index] = base - loads[index] + (number < extra)
    return parts


Boxes = tuple[Box, ...]
MISSING = "missing"
SENT_TWICE = "twice"
ALREADY_HELD = "there"
NOT_NEEDED = "strange"
WRONGLY_RETAINED = "false"
"""Errors of `find_cover_error`: no rank sends the box; it is sent twice, to a rank that already
holds it, or to a rank that does not need it; it is retained, but not held and needed once."""


@lru_cache(maxsize=4096)
def find_cover_error(
    need: Boxes, available: Boxes, retained: Boxes, arriving: Boxes
) -> tuple[str, Box] | None:
    """Check what one rank retains and receives of one tensor. Returns None if it is right.

    Otherwise (error, first box with it). The elements that the rank needs must be those that it
    retains of what it held plus those that arrive, each once. Checked in this order: arriving boxes
    (SENT_TWICE, ALREADY_HELD, NOT_NEEDED), retained boxes (WRONGLY_RETAINED), then MISSING
    elements. The check shares only the algebra of `Box` with `redistribute`. Cached, because the
    layers of a model repeat the same arguments.
    """
    for index, box in enumerate(arriving):
        if any(box.intersect(other) for other in arriving[:index]):
            return SENT_TWICE, box
        if any(box.intersect(other) for other in available):
            return ALREADY_HELD, box
        if subtract_all([box], need):
            return NOT_NEEDED, box
    for index, box in enumerate(retained):
        is_repeated = any(box.intersect(other) for other in retained[:index])
        if is_repeated or subtract_all([box], available) or subtract_all([box], need):
            return WRONGLY_RETAINED, box
    missing = subtract_all(make_disjoint(need), [*retained, *arriving])
    if missing:
        return (MISSING, missing[0])
    return None


_READER = -1


@lru_cache(maxsize=4096)
def plan_reads(available: Boxes, needed: Boxes) -> tuple[tuple[int, Box], ...]:
    """Return which parts of the available boxes to read: (index in available, box to read).

    Together they cover the needed elements, each once (asserted by `find_cover_error`). Elements
    that several available boxes have are divided among these. PlanError if an element is in no
    available box. Cached, because the layers of a model repeat the arguments.
    """
    plan = redistribute({index: (box,) for index, box in enumerate(available)}, {_READER: needed})
    reads = tuple((move.source, move.box) for move in plan.moves)
    error = find_cover_error(needed, (), (), tuple(part for _, part in reads))
    assert error is None, (error, available, needed)
    assert all(available[index].contains(part) for index, part in reads), (reads, available)
    return reads
