"""Plans that bring training weights to where generation needs them. Integers only.

`plan_reshard` looks at the boxes of each tensor that each rank has and needs and lets
`blocks.redistribute` say what is sent: each missing element once to each rank that lacks it,
nothing that is there. Tensors that ranks have and need alike, such as those of a model's layers,
are planned once. A plan stays inside the smallest scope that holds all that is needed:

    micro_dp   the ranks that share a generation shard: where generation nests in training
    replica    one copy of the model: where heads are cut through (kv heads < t)
    shard      the ranks of FSDP or ZeRO that hold one copy together
    pool       every rank: t_g > t, a separate rollout pool

Where the node of each rank is known, data that several ranks of a node lack enters the node once:
one of them receives it, and in a later bucket passes it on, out of its generator's weights. Not
where all ranks of a group need the same: their broadcast enters each node once anyway.

Every rank of `plan.ranks` executes a `ReshardPlan` bucket by bucket: for each message that the rank
sends or receives, in order, its source packs the parts (the values of each box, row-major, one
after the other, in the generator's precision) and sends them: a broadcast where a process group
over `message.ranks` exists, else point to point to each destination. When all messages of the
bucket have arrived, a destination writes each box to every place where its generation table has it
(`weights.move.Blocks`). What a rank keeps is written first, from its own shards. All ranks derive
the same plan from what all have and need; a rank expands only its own messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.blocks.plan import Boxes, Move, NodeOf, redistribute, redistribute_through_nodes
from spmdflow.errors import PlanError
from spmdflow.hybrid_engine.bucket import (
    Bucket,
    Message,
    Moves,
    Part,
    TensorPlan,
    chunks_of,
    pack_buckets,
)
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.generator import generator_kind
from spmdflow.kind.registry import resolve
from spmdflow.parallel.layout import Layout
from spmdflow.weights.adapter import is_adapter
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import BUCKET_BYTES, RankTables

BoxesByRank = Mapping[int, Mapping[str, Sequence[Box]]]
"""By global rank and Hugging Face name: boxes of the whole tensor; of one rank they may overlap."""
Groups = Sequence[tuple[int, ...]]
"""Disjoint sets of global ranks, each ascending."""


@dataclass(frozen=True)
class ReshardPlan:
    """What every rank sends, receives and keeps, tensor by tensor."""

    scope: str
    """micro_dp, replica, shard or pool: the smallest in which all that is needed is held."""
    groups: tuple[tuple[int, ...], ...]
    """The groups of the scope: no message leaves its group."""
    buckets: tuple[Bucket, ...]
    kept: tuple[tuple[str, Mapping[int, Boxes]], ...]
    """Tensor, then by rank: boxes that it needs and has; copied inside the rank, if at all."""
    element_bytes: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that takes part, ascending."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    def kept_by(self, rank: int) -> Iterator[Part]:
        """What a rank keeps."""
        return (Part(name, box) for name, by_rank in self.kept for box in by_rank.get(rank, ()))

    def messages_of(self, rank: int) -> list[tuple[Message, ...]]:
        """Of each bucket, those that a rank sends or receives, in order."""
        own: dict[int, list[Move]] = {}
        for _, moves in (pair for bucket in self.buckets for pair in bucket.moves):
            if id(moves) not in own:
                own[id(moves)] = [m for m in moves if rank == m.source or rank in m.destinations]
        messages = []
        for bucket in self.buckets:
            messages.append(
                bucket.messages_of((name, own[id(moves)]) for name, moves in bucket.moves)
            )
        return messages

    def moves(self) -> Iterator[tuple[Move, int]]:
        """Every distinct move, and for how many tensors it is made."""
        found = []
        for bucket in self.buckets:
            for _, moves in bucket.moves:
                found.append(moves)
        times = Counter(map(id, found))
        for key, moves in {id(moves): moves for moves in found}.items():
            yield from ((move, times[key]) for move in moves)

    def received_bytes(self, rank: int) -> int:
        """Bytes that reach a rank over the wire, in all buckets."""
        return self.element_bytes * self._received[rank]

    @cached_property
    def _received(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for move, times in self.moves():
            size = times * move.box.size
            for rank in move.destinations:
                found[rank] += size
        return found


def plan_reshard(
    have: BoxesByRank,
    need: BoxesByRank,
    *,
    scopes: Mapping[str, Groups],
    element_bytes: int,
    bucket_bytes: int,
    node_of: NodeOf | None = None,
    rank: int | None = None,
) -> ReshardPlan:
    """The plan from what training ranks have to what generation ranks need.

    Tensors go in the order of their first appearance in need (ranks ascending). scopes: candidates
    from the smallest to the largest (`scopes_of`); the first one in whose groups everything needed
    is held is taken. node_of: None if all ranks share a node. rank: only the group of this rank is
    planned; None: all groups are. PlanError if no scope holds everything.
    """
    assert bucket_bytes > 0 and element_bytes > 0, (bucket_bytes, element_bytes)
    limit = max(1, bucket_bytes // element_bytes)
    questions = _questions(have, need)
    for scope, groups in scopes.items():
        if not all(_is_held(question, group) for question in questions for group in groups):
            continue
        own = tuple(group for group in groups if rank is None or rank in group)
        nodes = [_nodes(need, group, node_of) for group in own]
        tensors: dict[str, TensorPlan] = {}
        for question in questions:
            tensors |= dict.fromkeys(question.names, _planned(question, own, nodes, limit))
        ordered = {}
        for name in _names(need):
            ordered[name] = tensors[name]
        kept = tuple((name, tensor.kept) for name, tensor in ordered.items())
        return ReshardPlan(scope, own, tuple(pack_buckets(ordered, limit)), kept, element_bytes)
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


@dataclass(frozen=True)
class Shards:
    """Groups whose ranks send one another all that they train (`hybrid_engine.shared_storage`)."""

    groups: Groups
    have: BoxesByRank
    need: BoxesByRank


def plan_copies(
    architecture: Architecture,
    cfg: Any,
    *,
    training: Layout,
    generation: Layout,
    itemsize: int,
    node_of: NodeOf | None = None,
    rank: int | None = None,
) -> Copies:
    """From a policy's layout to its generator's, which may be the same.

    cfg: the actor's settings (Any: a role's dataclass). itemsize: of rollout.dtype. node_of, rank:
    as `plan_reshard`.
    """
    trained = training_tables(architecture, training, kind=cfg.engine.kind)
    generates = generation_tables(architecture, generation, engine=cfg.rollout.generator)
    have, need = (what_moves(boxes_of(tables)) for tables in (trained, generates))
    plan = plan_reshard(
        have,
        need,
        scopes=scopes_of(training, generation),
        element_bytes=itemsize,
        bucket_bytes=BUCKET_BYTES,
        node_of=node_of,
        rank=rank,
    )
    return Copies(plan, have, need)


def sent_architecture(cfg: Any) -> Architecture:
    """The tensors that a policy sends and its generator has; adapters are beside the weights, or
    merged into them. cfg: the actor's settings."""
    found = Architecture.from_folder(cfg.model.path)
    if cfg.rollout.weights != "adapter":
        return found
    return replace(found, adapters=cfg.model.lora.adapters)


def what_moves(boxes: BoxesByRank) -> BoxesByRank:
    """All boxes, or those of adapters if there are some: other weights then stay as they are in
    the model's folder, which the generator has read."""
    if not any(map(is_adapter, chain.from_iterable(boxes.values()))):
        return boxes
    result = {}
    for rank, table in boxes.items():
        result[rank] = {name: some for name, some in table.items() if is_adapter(name)}
    return result


def boxes_of(tables: RankTables) -> BoxesByRank:
    """What the ranks hold, from their tables; equal tables are looked at once."""
    known: dict[int, Mapping[str, tuple[Box, ...]]] = {}
    for table in tables.values():
        if id(table) not in known:
            pieces = (piece for tensor in table.values() for piece in tensor.pieces)
            known[id(table)] = boxes_by_name((piece.name, None, piece.box) for piece in pieces)
    boxes = {}
    for rank, table in tables.items():
        boxes[rank] = known[id(table)]
    return boxes


def boxes_by_name(blocks: Iterable[tuple[str, object, Box]]) -> dict[str, Boxes]:
    """What a rank holds, from its live blocks; equal boxes are one object, also once pickled."""
    found: dict[str, list[Box]] = {}
    for name, _, box in blocks:
        if box.size:
            found.setdefault(name, []).append(box)
    known: dict[Boxes, Boxes] = {}
    result = {}
    for n, b in ((n, tuple(b)) for n, b in found.items()):
        result[n] = known.setdefault(b, b)
    return result


def with_shared_tables(boxes: BoxesByRank) -> BoxesByRank:
    """The same, where ranks that hold the same share one object."""
    known: dict[tuple[object, ...], Mapping[str, Sequence[Box]]] = {}
    result = {}
    for rank, table in boxes.items():
        result[rank] = known.setdefault(tuple((name, *some) for name, some in table.items()), table)
    return result


@dataclass(frozen=True)
class _Question:
    """What ranks have and need of some tensors, which are planned alike."""

    have: Mapping[int, Boxes]
    need: Mapping[int, Boxes]
    """Only ranks that have, or need, some."""
    names: list[str]


def _names(need: BoxesByRank) -> Iterable[str]:
    """In the order of their first appearance, ranks ascending."""
    tables = {}
    for rank in sorted(need):
        tables[id(need[rank])] = need[rank]
    return dict.fromkeys(name for table in tables.values() for name in table)


def _questions(have: BoxesByRank, need: BoxesByRank) -> list[_Question]:
    sides: list[list[tuple[Mapping[str, Sequence[Box]], list[int]]]] = []
    for side in (have, need):
        tables: dict[int, tuple[Mapping[str, Sequence[Box]], list[int]]] = {}
        for rank in sorted(side):
            tables.setdefault(id(side[rank]), (side[rank], []))[1].append(rank)
        sides.append(list(tables.values()))
    alike: dict[tuple[tuple[Boxes, ...], ...], list[str]] = {}
    for name in _names(need):
        key = tuple(tuple(tuple(table.get(name, ())) for table, _ in side) for side in sides)
        alike.setdefault(key, []).append(name)
    found = []
    for rows, names in alike.items():
        held, needed = (
            {rank: boxes for (_, ranks), boxes in zip(*both) for rank in ranks if boxes}
            for both in zip(sides, rows, strict=True)
        )
        found.append(_Question(held, needed, names))
    return found


def _is_held(question: _Question, group: tuple[int, ...]) -> bool:
    """Whether what ranks of a group need is there."""
    held = frozenset(question.have[rank] for rank in group if rank in question.have)
    wanted = set()
    for rank in group:
        if rank in question.need:
            wanted.add(question.need[rank])
    return all(_covers(held, boxes) for boxes in wanted)


@lru_cache(maxsize=4096)
def _covers(held: frozenset[Boxes], wanted: Boxes) -> bool:
    return not subtract_all(wanted, sorted({box for boxes in held for box in boxes}))


def _nodes(
    need: BoxesByRank, group: tuple[int, ...], node_of: NodeOf | None
) -> tuple[int, ...] | None:
    """The node of each rank, numbered within the group; None where all need the same."""
    first = need.get(group[0])
    if node_of is None or all(need.get(r) is first or need.get(r) == first for r in group):
        return None
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(node_of(rank), len(numbers)) for rank in group)


def _planned(
    question: _Question,
    groups: Groups,
    nodes: Sequence[tuple[int, ...] | None],
    limit: int,
) -> TensorPlan:
    rounds: tuple[list[Move], list[Move]] = ([], [])
    kept: dict[int, Boxes] = {}
    for group, its_nodes in zip(groups, nodes, strict=True):
        sides = (tuple(side.get(r, ()) for r in group) for side in (question.have, question.need))
        *both, stays = _plan_of_places(*sides, its_nodes)
        for moves, some in zip(rounds, both, strict=True):
            for move in some:
                ranks = tuple(group[place] for place in move.destinations)
                moves.append(Move(group[move.source], move.box, ranks))
        kept |= {group[place]: boxes for place, boxes in stays.items() if boxes}
    places = {}
    for place, rank in enumerate(r for group in groups for r in group):
        places[rank] = place
    first, relayed = (chunks_of(moves, places, limit) for moves in rounds)
    return TensorPlan(first, relayed, kept)


@lru_cache(maxsize=4096)
def _plan_of_places(
    have: tuple[Boxes, ...], need: tuple[Boxes, ...], nodes: tuple[int, ...] | None
) -> tuple[Moves, Moves, Mapping[int, Boxes]]:
    """(moves, moves after them, kept) in one group, ranks as places in it.

    Cached, as the groups of different replicas need the same plan.
    """
    held, needed = (dict(enumerate(side)) for side in (have, need))
    if nodes is None:
        plan = redistribute(held, needed)
        return plan.moves, (), plan.retained
    plan, after = redistribute_through_nodes(held, needed, node_of=nodes.__getitem__)
    return plan.moves, after.moves, plan.retained
