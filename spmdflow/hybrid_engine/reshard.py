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

Every rank of `plan.ranks` executes a `ReshardPlan` bucket by bucket: for each message that the rank
sends or receives, in order, its source packs the parts (the values of each box, row-major, one
behind the other, in the generator's precision) and sends them: a broadcast where a process group
over `message.ranks` exists, else point to point to each destination. When all messages of the
bucket have arrived, a destination writes each box to every place where its generation table has it
(`weights.move.Blocks`). `plan.kept` is written the same way, from the rank's own shards. All ranks
derive the same plan from what all have and need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from spmdflow.blocks.box import Box, disjoint, merged, subtract_all
from spmdflow.blocks.plan import NodeOf, redistribute
from spmdflow.errors import PlanError
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.generator import generator_kind
from spmdflow.kind.registry import resolve
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import BUCKET_BYTES, RankTables

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

    def messages_of(self, rank: int) -> list[list[Message]]:
        """Of each bucket, those that a rank sends or receives, in order."""
        return [
            [m for m in bucket.messages if rank == m.source or rank in m.destinations]
            for bucket in self.buckets
        ]

    def received_bytes(self, rank: int) -> int:
        """Bytes that reach a rank over the wire, in all buckets."""
        arriving = (m for some in self.messages_of(rank) for m in some if m.source != rank)
        return self.element_bytes * sum(message.num_elements for message in arriving)


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
    limit = max(1, bucket_bytes // element_bytes)
    for scope, groups in scopes.items():
        moves = _moves(have, need, groups, node_of)
        if moves is not None:
            sent, kept = moves
            buckets = tuple(_packed(sent, limit))
            parts = {rank: tuple(parts) for rank, parts in kept.items()}
            return ReshardPlan(scope, tuple(groups), buckets, parts, element_bytes)
    got = f"training ranks {sorted(have)} that do not hold all that generation ranks "
    got += f"{sorted(need)} need within {list(scopes)}"
    raise PlanError.of("reshard", got, "a whole copy", "give the ranks of a replica")


def scopes_of(training: Layout, generation: Layout) -> dict[str, Groups]:
    """Candidate scopes, smallest first; generation: the same layout, or a separate pool's."""
    pool = [tuple(sorted({*training.ranks, *generation.ranks}))]
    several = training.shard_size < training.dp_size
    if training != generation or not (training.nests or several):
        return {"pool": pool}
    smaller = ("micro_dp", "replica", "shard") if training.nests else ("shard",)
    return {**{axis: training.axis_groups(axis) for axis in smaller}, "pool": pool}


def training_tables(architecture: Architecture, layout: Layout, *, kind: str) -> RankTables:
    """What each rank trains with, by engine.kind."""
    tables: RankTables = resolve(engine_kind(kind).weight_table)(architecture, layout)
    return tables


def generation_tables(architecture: Architecture, layout: Layout, *, engine: str) -> RankTables:
    """What each rank generates with, by rollout.engine and the layout's generation sizes."""
    tables: RankTables = resolve(generator_kind(engine).weight_table)(architecture, layout)
    return tables


@dataclass(frozen=True)
class Copies:
    """A plan of boxes, and what it was made from."""

    plan: ReshardPlan
    have: BoxesByRank
    need: BoxesByRank


def plan_copies(
    architecture: Architecture, cfg: Any, *, training: Layout, generation: Layout, itemsize: int
) -> Copies:
    """From a policy's layout to its generator's, which may be the same.

    cfg: the actor's settings (Any: a role's dataclass). itemsize: of rollout.dtype.
    """
    have = boxes_of(training_tables(architecture, training, kind=cfg.engine.kind))
    need = boxes_of(generation_tables(architecture, generation, engine=cfg.rollout.generator))
    scopes = scopes_of(training, generation)
    plan = plan_reshard(
        have, need, scopes=scopes, element_bytes=itemsize, bucket_bytes=BUCKET_BYTES
    )
    return Copies(plan, have, need)


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


_Sent = tuple[int, Box, tuple[int, ...]]
"""(source, box, destinations)."""
_Places = tuple[tuple[Box, ...], ...]


def _moves(
    have: BoxesByRank, need: BoxesByRank, groups: Groups, node_of: NodeOf | None
) -> tuple[dict[str, list[_Sent]], dict[int, list[Part]]] | None:
    """What is sent of each tensor, and what each rank keeps; None if a group lacks an element."""
    sent: dict[str, list[_Sent]] = {name: [] for rank in sorted(need) for name in need[rank]}
    kept: dict[int, list[Part]] = {rank: [] for rank in sorted(need)}
    for name in sent:
        for group in groups:
            nodes = None if node_of is None else tuple(node_of(rank) for rank in group)
            moves = _moves_of_places(
                tuple(tuple(have.get(rank, {}).get(name, ())) for rank in group),
                tuple(tuple(need.get(rank, {}).get(name, ())) for rank in group),
                nodes,
            )
            if moves is None:
                return None
            for source, box, places in moves[0]:
                sent[name].append((group[source], box, tuple(group[place] for place in places)))
            for place, boxes in moves[1].items():
                if boxes:
                    kept[group[place]] += [Part(name, box) for box in boxes]
    return sent, kept


@lru_cache(maxsize=4096)
def _moves_of_places(
    have: _Places, need: _Places, nodes: tuple[int, ...] | None
) -> tuple[list[_Sent], Mapping[int, tuple[Box, ...]]] | None:
    """(sent, kept) of one tensor in one group, ranks as places in it; None if it lacks an element.

    Layers of a stage, and groups of different replicas, ask the same: the answer is kept.
    """
    everything = [box for boxes in have for box in boxes]
    wanted = set(need)
    if any(subtract_all(boxes, everything) for boxes in wanted):
        return None
    num_held, num_needed = (sum(b.size for b in some) for some in (everything, disjoint(need[0])))
    if len(wanted) == 1 and num_held == num_needed:
        return _from_each_to_all(have)
    node_of = None if nodes is None else nodes.__getitem__
    plan = redistribute(dict(enumerate(have)), dict(enumerate(need)), node_of=node_of)
    sent: dict[tuple[int, Box], list[int]] = {}
    for edge in plan.edges:
        sent.setdefault((edge.source, edge.box), []).append(edge.destination)
    return [(*key, tuple(to)) for key, to in sent.items()], plan.kept


def _from_each_to_all(have: _Places) -> tuple[list[_Sent], Mapping[int, tuple[Box, ...]]]:
    """What `redistribute` gives where all need the same and each element has one holder (FSDP)."""
    kept = {place: tuple(merged(boxes)) for place, boxes in enumerate(have)}
    others = {source: tuple(place for place in kept if place != source) for source in kept}
    sent = [(s, box, others[s]) for s, boxes in kept.items() for box in sorted(boxes) if others[s]]
    return sent, kept


def _packed(sent: Mapping[str, Sequence[_Sent]], limit: int) -> Iterator[Bucket]:
    """Buckets in the order of the model; no rank sends or receives more than limit elements."""
    parts: dict[tuple[int, tuple[int, ...]], list[Part]] = {}
    packed, reaching = Counter[int](), Counter[int]()
    for name, pieces in _slab_by_slab(sent, limit):
        more_packed, more_reaching = Counter[int](), Counter[int]()
        for (source, box), destinations in pieces.items():
            more_packed[source] += box.size
            more_reaching.update(dict.fromkeys(destinations, box.size))
        both = ((packed, more_packed), (reaching, more_reaching))
        if any(total[rank] + size > limit for total, more in both for rank, size in more.items()):
            if parts:
                yield _bucket(parts)
            parts, packed, reaching = {}, Counter(), Counter()
        packed.update(more_packed)
        reaching.update(more_reaching)
        for (source, box), destinations in pieces.items():
            parts.setdefault((source, tuple(sorted(destinations))), []).append(Part(name, box))
    if parts:
        yield _bucket(parts)


def _bucket(parts: Mapping[tuple[int, tuple[int, ...]], Sequence[Part]]) -> Bucket:
    return Bucket(tuple(Message(*key, tuple(some)) for key, some in sorted(parts.items())))


def _slab_by_slab(
    sent: Mapping[str, Sequence[_Sent]], limit: int
) -> Iterator[tuple[str, dict[tuple[int, Box], list[int]]]]:
    """What is sent of each tensor, (source, box) -> destinations, in slabs that fit a bucket."""
    for name, some in sent.items():
        for slab in _slabs([box for _, box, _ in some], limit):
            pieces: dict[tuple[int, Box], list[int]] = {}
            for source, box, destinations in some:
                common = box.intersect(slab)
                if common is not None:
                    pieces.setdefault((source, common), []).extend(destinations)
            yield name, pieces


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
