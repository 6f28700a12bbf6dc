"""Plans that bring training weights to where generation needs them. Integers only.

`plan_reshard` looks, tensor by tensor, at the boxes that each rank has and needs and lets
`blocks.redistribute` say what is sent: each missing element once to each rank that lacks it,
nothing that is there. It stays inside the smallest scope that holds all that is needed:

    micro_dp   the ranks that share a generation shard: where generation nests in training
    replica    one copy of the model: where heads are cut through (kv heads < t)
    shard      the ranks of FSDP or ZeRO that hold one copy together
    pool       every rank: t_g > t, a separate rollout pool

Messages are gathered in buckets, in the order of the model, so that no rank packs or receives more
than `bucket_bytes` at a time (a single row of a tensor that is larger goes alone).

How a runtime executes a `ReshardPlan`, on every rank of `plan.ranks`, bucket by bucket:
for each message of `bucket.messages_of(rank)`, in order, its source packs the parts (the values of
each box, row-major, one behind the other, in the generator's precision) and sends them: a broadcast
where a process group over `message.ranks` exists, else point to point to each destination. When all
messages of the bucket have arrived, a destination writes each box to every place where its
generation table has it (`weights.move.Blocks`). `plan.kept` is written the same way, from the
rank's own shards. All ranks derive the same plan from what all have and need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from spmdflow.blocks.box import Box, disjoint, merged, subtract_all
from spmdflow.blocks.plan import NodeOf, redistribute
from spmdflow.errors import PlanError
from spmdflow.parallel.layout import Layout
from spmdflow.weights.ranks import RankTables

BoxesByRank = Mapping[int, Mapping[str, Sequence[Box]]]
"""By global rank and Hugging Face name: boxes of the whole tensor; of one rank they may overlap."""
Groups = Sequence[tuple[int, ...]]
"""Disjoint sets of global ranks, each ascending."""


@dataclass(frozen=True)
class Part:
    """A box of a Hugging Face tensor."""

    name: str
    box: Box


@dataclass(frozen=True)
class Message:
    """`source` sends the same parts to every destination."""

    source: int
    destinations: tuple[int, ...]
    """Ascending; the source is not among them."""
    parts: tuple[Part, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Source and destinations, ascending: the group of a broadcast."""
        return tuple(sorted((self.source, *self.destinations)))

    @property
    def num_elements(self) -> int:
        """Elements that each destination receives."""
        return sum(part.box.size for part in self.parts)


@dataclass(frozen=True)
class Bucket:
    """Messages that may be under way at the same time."""

    messages: tuple[Message, ...]
    """In the order in which every rank starts them."""

    def messages_of(self, rank: int) -> list[Message]:
        """Those that a rank sends or receives, in order."""
        return [m for m in self.messages if rank == m.source or rank in m.destinations]

    @cached_property
    def sent(self) -> Mapping[int, int]:
        """Elements that each source packs (once for all destinations)."""
        return _totals((m.source, m.num_elements) for m in self.messages)

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Elements that reach each destination."""
        return _totals((rank, m.num_elements) for m in self.messages for rank in m.destinations)


@dataclass(frozen=True)
class ReshardPlan:
    """What every rank sends, receives and keeps, tensor by tensor."""

    scope: str
    """micro_dp, replica, shard or pool: the smallest in which all that is needed is held."""
    groups: tuple[tuple[int, ...], ...]
    """The groups of the scope: no message leaves its group."""
    buckets: tuple[Bucket, ...]
    kept: Mapping[int, tuple[Part, ...]]
    """By rank: what it needs and has; moved inside the rank, if at all."""
    element_bytes: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that takes part, ascending."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    def received_bytes(self, rank: int) -> int:
        """Bytes that reach a rank over the wire, in all buckets."""
        return self.element_bytes * sum(bucket.received.get(rank, 0) for bucket in self.buckets)

    def staging_bytes(self, rank: int) -> int:
        """The most bytes that a rank packs and receives in one bucket: its buffers."""
        sizes = (b.sent.get(rank, 0) + b.received.get(rank, 0) for b in self.buckets)
        return self.element_bytes * max(sizes, default=0)


def plan_reshard(
    have: BoxesByRank,
    need: BoxesByRank,
    *,
    scopes: Mapping[str, Groups],
    element_bytes: int,
    bucket_bytes: int,
    node_of: NodeOf | None = None,
) -> ReshardPlan:
    """The plan from what training ranks have to what generation ranks need.

    Tensors go in the order of their first appearance in need (ranks ascending). scopes: candidates
    from the smallest to the largest (`scopes_of`); the first one in whose groups everything needed
    is held is taken. PlanError if none is.
    """
    assert bucket_bytes > 0 and element_bytes > 0, (bucket_bytes, element_bytes)
    names = dict.fromkeys(name for rank in sorted(need) for name in need[rank])
    for scope, groups in scopes.items():
        moves = _moves(names, have, need, groups, node_of)
        if moves is not None:
            packing = _Packing(max(1, bucket_bytes // element_bytes))
            for name, per_group in moves.items():
                packing.add(name, per_group)
            return ReshardPlan(
                scope, tuple(groups), packing.buckets(), _kept(moves, need), element_bytes
            )
    raise PlanError(
        f"reshard: got training ranks {sorted(have)} that do not hold all that generation ranks "
        f"{sorted(need)} need within {list(scopes)}, expected a whole copy; give the ranks of a "
        f"replica"
    )


def scopes_of(training: Layout, generation: Layout) -> dict[str, Groups]:
    """Candidate scopes, smallest first; generation: the same layout, or a separate pool's."""
    pool = [tuple(sorted({*training.ranks, *generation.ranks}))]
    if training != generation or not training.nests:
        return {"pool": pool}
    smaller = ("micro_dp", "replica", "shard")
    return {**{axis: training.axis_groups(axis) for axis in smaller}, "pool": pool}


def boxes_of(tables: RankTables) -> BoxesByRank:
    """What the ranks hold, from their tables; equal tables are looked at once."""
    known: dict[int, Mapping[str, tuple[Box, ...]]] = {}
    for table in tables.values():
        if id(table) not in known:
            pieces = (piece for tensor in table.values() for piece in tensor.pieces)
            known[id(table)] = boxes_by_name((piece.name, None, piece.box) for piece in pieces)
    return {rank: known[id(table)] for rank, table in tables.items()}


def boxes_by_name(blocks: Iterable[tuple[str, object, Box]]) -> dict[str, tuple[Box, ...]]:
    """What a rank holds, from its live blocks."""
    found: dict[str, list[Box]] = {}
    for name, _, box in blocks:
        if box.size:
            found.setdefault(name, []).append(box)
    return {name: tuple(boxes) for name, boxes in found.items()}


def shapes_of(boxes: BoxesByRank) -> dict[str, tuple[int, ...]]:
    """How far the boxes of all ranks reach: the shape of each tensor that they hold together."""
    found: dict[str, tuple[int, ...]] = {}
    for held in boxes.values():
        for name, some in held.items():
            for box in some:
                ends = tuple(stop for _, stop in box.bounds)
                found[name] = tuple(map(max, ends, found.get(name, ends)))
    return found


@dataclass(frozen=True)
class _Moves:
    """What one tensor moves in one group."""

    sent: tuple[tuple[int, Box, tuple[int, ...]], ...]
    """(source, box, destinations), by source, then first destination."""
    kept: Mapping[int, tuple[Box, ...]]


_GroupMoves = tuple[tuple[int, ...], _Moves]
"""A group, and what moves in it by places in the group."""
_Places = tuple[tuple[Box, ...], ...]


def _moves(
    names: Iterable[str],
    have: BoxesByRank,
    need: BoxesByRank,
    groups: Groups,
    node_of: NodeOf | None,
) -> dict[str, list[_GroupMoves]] | None:
    """By name, what each group moves; None if a group lacks an element."""
    found: dict[str, list[_GroupMoves]] = {}
    for name in names:
        for group in groups:
            nodes = None if node_of is None else tuple(node_of(rank) for rank in group)
            moves = _moves_of_places(
                tuple(tuple(have.get(rank, {}).get(name, ())) for rank in group),
                tuple(tuple(need.get(rank, {}).get(name, ())) for rank in group),
                nodes,
            )
            if moves is None:
                return None
            found.setdefault(name, []).append((group, moves))
    return found


@lru_cache(maxsize=4096)
def _moves_of_places(have: _Places, need: _Places, nodes: tuple[int, ...] | None) -> _Moves | None:
    """The moves of one tensor in one group, ranks as places in it; None if an element is missing.

    Layers of a stage, and groups of different replicas, ask the same: the answer is kept.
    """
    everything = [box for boxes in have for box in boxes]
    wanted = set(need)
    if any(subtract_all(boxes, everything) for boxes in wanted):
        return None
    if len(wanted) == 1 and sum(box.size for box in everything) == _size(need[0]):
        return _from_each_to_all(have)
    node_of = None if nodes is None else nodes.__getitem__
    plan = redistribute(dict(enumerate(have)), dict(enumerate(need)), node_of=node_of)
    sent: dict[tuple[int, Box], list[int]] = {}
    for edge in plan.edges:
        sent.setdefault((edge.source, edge.box), []).append(edge.destination)
    return _Moves(tuple((*key, tuple(to)) for key, to in sent.items()), plan.kept)


def _from_each_to_all(have: _Places) -> _Moves:
    """What `redistribute` gives where all need the same and each element has one holder (FSDP)."""
    kept = {place: tuple(merged(boxes)) for place, boxes in enumerate(have)}
    sent = [
        (source, box, tuple(place for place in kept if place != source))
        for source, boxes in kept.items()
        for box in sorted(boxes)
    ]
    return _Moves(tuple(move for move in sent if move[2]), kept)


def _kept(moves: Mapping[str, list[_GroupMoves]], need: BoxesByRank) -> dict[int, tuple[Part, ...]]:
    kept: dict[int, list[Part]] = {rank: [] for rank in sorted(need)}
    for name, per_group in moves.items():
        for group, tensor in per_group:
            for place, boxes in tensor.kept.items():
                if boxes:
                    kept[group[place]] += [Part(name, box) for box in boxes]
    return {rank: tuple(parts) for rank, parts in kept.items()}


_Pieces = dict[tuple[int, Box], list[int]]
"""(source, box) -> destinations."""


class _Packing:
    """Fills buckets in the order of the model; no rank sends or receives more than the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._done: list[Bucket] = []
        self._open: dict[tuple[int, tuple[int, ...]], list[Part]] = {}
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def add(self, name: str, per_group: Sequence[_GroupMoves]) -> None:
        """Append what a tensor moves, in slabs of rows that fit into a bucket."""
        sent = [
            (group[source], box, [group[place] for place in destinations])
            for group, moves in per_group
            for source, box, destinations in moves.sent
        ]
        for slab in _slabs([box for _, box, _ in sent], self._limit):
            pieces: _Pieces = {}
            for source, box, destinations in sent:
                common = box.intersect(slab)
                if common is not None:
                    pieces.setdefault((source, common), []).extend(destinations)
            self._append(name, pieces)

    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets; call once, at the end."""
        self._close()
        return tuple(self._done)

    def _append(self, name: str, pieces: _Pieces) -> None:
        sizes = [(source, to, box.size) for (source, box), to in pieces.items()]
        sent = _totals((source, size) for source, _, size in sizes)
        received = _totals((rank, size) for _, to, size in sizes for rank in to)
        if not (self._fits(self._sent, sent) and self._fits(self._received, received)):
            self._close()
        for (source, box), destinations in pieces.items():
            key = source, tuple(sorted(destinations))
            self._open.setdefault(key, []).append(Part(name, box))
        for total, more in ((self._sent, sent), (self._received, received)):
            for rank, size in more.items():
                total[rank] = total.get(rank, 0) + size

    def _fits(self, total: Mapping[int, int], more: Mapping[int, int]) -> bool:
        return all(total.get(rank, 0) + size <= self._limit for rank, size in more.items())

    def _close(self) -> None:
        messages = [
            Message(source, destinations, tuple(parts))
            for (source, destinations), parts in sorted(self._open.items())
        ]
        if messages:
            self._done.append(Bucket(tuple(messages)))
        self._open, self._sent, self._received = {}, {}, {}


def _slabs(boxes: Sequence[Box], limit: int) -> list[Box]:
    """Boxes of whole rows, of at most limit elements (or one row), that hold all of boxes."""
    if not boxes:
        return []
    bounds = [box.bounds for box in boxes]
    if not bounds[0]:
        return [boxes[0]]
    outer = [(min(low for low, _ in dim), max(high for _, high in dim)) for dim in zip(*bounds)]
    (first, last), *inner = outer
    height = max(1, limit // prod(high - low for low, high in inner))
    return [
        Box(((start, min(start + height, last)), *inner)) for start in range(first, last, height)
    ]


def _size(boxes: Sequence[Box]) -> int:
    """Elements of disjoint boxes."""
    return sum(box.size for box in disjoint(boxes))


def _totals(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for rank, size in pairs:
        found[rank] = found.get(rank, 0) + size
    return found
