"""Plans that bring training weights to where generation needs them. Integers only.

`plan_reshard` takes the boxes of each tensor that each rank has and needs. `blocks.redistribute`
determines what is sent: each missing element once to each rank that lacks it, and nothing that is
already there. Tensors with the same distribution, such as those of a model's layers, are planned
once. A plan stays within the smallest scope that contains everything needed:

    micro_dp   the ranks that share a generation shard: where generation nests in training
    replica    one copy of the model: where heads are cut through (kv heads < t)
    shard      the ranks of FSDP or ZeRO that hold one copy together
    pool       every rank: t_g > t, a separate rollout pool

If the node of each rank is known, data that several ranks of a node lack enters the node once: one
of them receives it and forwards it in a later bucket, from its generator's weights. This is not
needed where all ranks of a group need the same: their broadcast enters each node once anyway.

Every rank of `plan.ranks` executes a `ReshardPlan` bucket by bucket: for each message that the rank
sends or receives, in order, its source packs the parts (the values of each box, row-major, one
after the other, in the generator's precision) and sends them: a broadcast where a process group
over `message.ranks` exists, otherwise point to point to each destination. When all messages of the
bucket have arrived, a destination writes each box to every location that its generation table has
for it (`weights.move.Blocks`). Boxes that stay on a rank are written first, from its own shards.
All ranks derive the same plan from the boxes of all ranks; a rank expands only its own messages.
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
    BoxPart,
    Bucket,
    Message,
    Moves,
    TensorPlan,
    chunk_moves,
    pack_buckets,
)
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.generator import generator_kind
from spmdflow.parallel.layout import Layout
from spmdflow.weights.adapter import is_adapter
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import with_tensors
from spmdflow.weights.ranks import (
    BUCKET_BYTES,
    RankTables,
    is_derived,
    tables_of,
    whole_tables,
)

BoxesByRank = Mapping[int, Mapping[str, Sequence[Box]]]
"""By global rank and Hugging Face name: boxes of the complete tensor. A rank's may overlap."""
Groups = Sequence[tuple[int, ...]]
"""Disjoint sets of global ranks, each ascending."""


@dataclass(frozen=True)
class ReshardPlan:
    """What every rank sends, receives and copies locally, tensor by tensor."""

    scope: str
    """micro_dp, replica, shard or pool: the smallest that contains everything needed."""
    groups: tuple[tuple[int, ...], ...]
    """The groups of the scope: no message leaves its group."""
    buckets: tuple[Bucket, ...]
    local: tuple[tuple[str, Mapping[int, Boxes]], ...]
    """(tensor, by rank: boxes that it both has and needs). They are copied within the rank, if at
    all."""
    element_bytes: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that takes part, ascending."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    def local_parts(self, rank: int) -> Iterator[BoxPart]:
        """The parts that a rank both has and needs."""
        return (BoxPart(name, box) for name, by_rank in self.local for box in by_rank.get(rank, ()))

    def messages_of(self, rank: int) -> list[tuple[Message, ...]]:
        """Returns, for each bucket, the messages that `rank` sends or receives, in order.

        The tuple of a bucket without any is empty.
        """
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
        """Yields every distinct move, with the number of tensors that it is made for."""
        moves_of_tensors = []
        for bucket in self.buckets:
            for _, moves in bucket.moves:
                moves_of_tensors.append(moves)
        count_of_moves = Counter(map(id, moves_of_tensors))
        for key, moves in {id(moves): moves for moves in moves_of_tensors}.items():
            yield from ((move, count_of_moves[key]) for move in moves)

    def received_bytes(self, rank: int) -> int:
        """Bytes that a rank receives over the network, in all buckets."""
        return self.element_bytes * self._received_elements[rank]

    @cached_property
    def _received_elements(self) -> Counter[int]:
        """Elements that each rank receives, in all buckets."""
        received: Counter[int] = Counter()
        for move, times in self.moves():
            size = times * move.box.size
            for rank in move.destinations:
                received[rank] += size
        return received


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
    """The plan from the boxes of training ranks to the boxes that generation ranks need.

    Tensors go in the order of their first appearance in need (ranks ascending). scopes: candidates
    from the smallest to the largest (`scopes_of`); the first one whose groups contain everything
    needed is used. node_of: None if all ranks share a node. rank: plan only the group of this rank;
    None: all groups. PlanError if no scope contains everything.
    """
    assert bucket_bytes > 0 and element_bytes > 0, (bucket_bytes, element_bytes)
    limit = max(1, bucket_bytes // element_bytes)
    distributions = _distributions(have, need)
    for scope, groups in scopes.items():
        if not all(
            _is_available(distribution, group) for distribution in distributions for group in groups
        ):
            continue
        own = tuple(group for group in groups if rank is None or rank in group)
        nodes = [_nodes(need, group, node_of) for group in own]
        tensors: dict[str, TensorPlan] = {}
        for distribution in distributions:
            tensors |= dict.fromkeys(
                distribution.names, _plan_tensor(distribution, own, nodes, limit)
            )
        ordered = {}
        for name in _names(need):
            ordered[name] = tensors[name]
        local = tuple((name, tensor.local) for name, tensor in ordered.items())
        return ReshardPlan(scope, own, tuple(pack_buckets(ordered, limit)), local, element_bytes)
    got = f"training ranks {sorted(have)} that do not hold all that generation ranks "
    got += f"{sorted(need)} need within {list(scopes)}"
    raise PlanError.of("reshard", got, "a complete copy", "pass all ranks of a replica")


def scopes_of(training: Layout, generation: Layout) -> dict[str, Groups]:
    """Returns the candidate scopes for `plan_reshard`, smallest first: name -> groups of ranks.

    If training and generation have the same layout, these are micro_dp and replica if generation
    nests in training, copy if experts are divided, and shard if generation nests or the weights
    have several complete copies. The last one is always the pool: all ranks of both layouts.
    generation: the same layout, or that of a separate pool.
    """
    smaller: list[str] = []
    if training == generation:
        if training.nests:
            smaller += ["micro_dp", "replica"]
        if training.expert_size > 1:
            smaller.append("copy")
        if training.nests or training.shard_size < training.weight_size:
            smaller.append("shard")
    pool = [tuple(sorted({*training.ranks, *generation.ranks}))]
    return {**{axis: training.axis_groups(axis) for axis in smaller}, "pool": pool}


def training_tables(architecture: Architecture, layout: Layout, *, kind: str) -> RankTables:
    """The tensors that each rank trains, for an engine.kind."""
    return tables_of(engine_kind(kind).weight_table, architecture, layout)


def generation_tables(architecture: Architecture, layout: Layout, *, engine: str) -> RankTables:
    """The tensors that each rank generates with, for a rollout.engine and the layout's generation
    sizes.

    A generator has every tensor of an architecture whose table only its loader knows
    (`ranks.is_derived`), if it is alone; ConfigError if several ranks divide them.
    """
    kind = generator_kind(engine)
    is_alone = layout.gen_tp_size * layout.gen_pp_size == 1
    if is_alone and is_derived(kind, architecture):
        return whole_tables(architecture, layout)
    return tables_of(kind.weight_table, architecture, layout)


@dataclass(frozen=True)
class Copies:
    """A plan of boxes, and the boxes that it was made from."""

    plan: ReshardPlan
    have: BoxesByRank
    need: BoxesByRank


@dataclass(frozen=True)
class Shards:
    """Groups whose ranks exchange all weights that they train (`hybrid_engine.shared_storage`)."""

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
    """Plans the copies from a policy's layout to its generator's, which may be the same layout.

    If the architecture has adapters, only their tensors are copied. cfg: the actor's settings (Any:
    a role's dataclass). itemsize: bytes per element of rollout.dtype. node_of, rank: see
    `plan_reshard`.
    """
    trained = training_tables(architecture, training, kind=cfg.engine.kind)
    generates = generation_tables(architecture, generation, engine=cfg.rollout.generator)
    return plan_boxes(
        boxes_of(trained),
        boxes_of(generates),
        training=training,
        generation=generation,
        itemsize=itemsize,
        node_of=node_of,
        rank=rank,
    )


def plan_boxes(
    have: BoxesByRank,
    need: BoxesByRank,
    *,
    training: Layout,
    generation: Layout,
    itemsize: int,
    node_of: NodeOf | None = None,
    rank: int | None = None,
) -> Copies:
    """Plan the copies from the boxes that each rank trains to those that it generates with.

    If there are adapters, only their boxes are copied. Other arguments: as in `plan_copies`.
    """
    have = moved_boxes(have)
    need = moved_boxes(need)
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
    """The tensors that a policy sends to its generator: weights and, if they are not merged,
    adapters.

    cfg: the actor's settings.
    """
    architecture = Architecture.sizes_from_folder(cfg.model.path)
    if architecture.obstacle:
        architecture = with_tensors(architecture, cfg.model.path)
    if cfg.rollout.weights != "adapter":
        return architecture
    return replace(architecture, adapters=cfg.model.lora.adapters)


def moved_boxes(boxes: BoxesByRank) -> BoxesByRank:
    """Returns only the boxes of adapters, if any rank has one; otherwise all boxes.

    With adapters, the generator has read the other weights from the model's folder.
    """
    if not any(map(is_adapter, chain.from_iterable(boxes.values()))):
        return boxes
    result = {}
    for rank, table in boxes.items():
        result[rank] = {name: some for name, some in table.items() if is_adapter(name)}
    return result


def boxes_of(tables: RankTables) -> BoxesByRank:
    """The boxes that each rank holds, from the ranks' tables. Equal tables are converted once."""
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
    """Returns tensor name -> a rank's boxes of that tensor, from its live blocks.

    Boxes without elements are omitted. Tensors with equal boxes share one tuple, also after
    pickling.
    """
    lists: dict[str, list[Box]] = {}
    for name, _, box in blocks:
        if box.size:
            lists.setdefault(name, []).append(box)
    known: dict[Boxes, Boxes] = {}
    result = {}
    for n, b in ((n, tuple(b)) for n, b in lists.items()):
        result[n] = known.setdefault(b, b)
    return result


def with_shared_tables(boxes: BoxesByRank) -> BoxesByRank:
    """The same boxes, where ranks with equal tables share one object."""
    known: dict[tuple[object, ...], Mapping[str, Sequence[Box]]] = {}
    result = {}
    for rank, table in boxes.items():
        result[rank] = known.setdefault(tuple((name, *some) for name, some in table.items()), table)
    return result


@dataclass(frozen=True)
class _Distribution:
    """The boxes that ranks have and need of some tensors, which are planned together."""

    have: Mapping[int, Boxes]
    need: Mapping[int, Boxes]
    """Both without ranks that have, or need, nothing."""
    names: list[str]


def _names(need: BoxesByRank) -> Iterable[str]:
    """Tensor names in the order of their first appearance, ranks ascending."""
    tables = {}
    for rank in sorted(need):
        tables[id(need[rank])] = need[rank]
    return dict.fromkeys(name for table in tables.values() for name in table)


def _distributions(have: BoxesByRank, need: BoxesByRank) -> list[_Distribution]:
    """Groups tensors for which every rank has the same boxes and needs the same boxes.

    The groups, and the names in each, are in the order of `_names(need)`.
    """
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
    result = []
    for rows, names in alike.items():
        available, needed = (
            {rank: boxes for (_, ranks), boxes in zip(*both) for rank in ranks if boxes}
            for both in zip(sides, rows, strict=True)
        )
        result.append(_Distribution(available, needed, names))
    return result


def _is_available(distribution: _Distribution, group: tuple[int, ...]) -> bool:
    """Returns whether the ranks of a group together have every box that one of them needs."""
    available = frozenset(distribution.have[rank] for rank in group if rank in distribution.have)
    wanted = set()
    for rank in group:
        if rank in distribution.need:
            wanted.add(distribution.need[rank])
    return all(_covers(available, boxes) for boxes in wanted)


@lru_cache(maxsize=4096)
def _covers(available: frozenset[Boxes], wanted: Boxes) -> bool:
    return not subtract_all(wanted, sorted({box for boxes in available for box in boxes}))


def _nodes(
    need: BoxesByRank, group: tuple[int, ...], node_of: NodeOf | None
) -> tuple[int, ...] | None:
    """Returns the node of each rank of a group, numbered from 0 in order of appearance.

    None if node_of is None, or if all ranks of the group need the same boxes.
    """
    first = need.get(group[0])
    if node_of is None or all(need.get(r) is first or need.get(r) == first for r in group):
        return None
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(node_of(rank), len(numbers)) for rank in group)


def _plan_tensor(
    distribution: _Distribution,
    groups: Groups,
    nodes: Sequence[tuple[int, ...] | None],
    limit: int,
) -> TensorPlan:
    """Returns the plan of one tensor, from the plans of all groups, with global ranks.

    nodes: for each group, see `_nodes`. limit: elements that a rank packs or receives per bucket.
    """
    rounds: tuple[list[Move], list[Move]] = ([], [])
    local: dict[int, Boxes] = {}
    for group, its_nodes in zip(groups, nodes, strict=True):
        sides = (
            tuple(side.get(r, ()) for r in group) for side in (distribution.have, distribution.need)
        )
        *both, local_by_index = _plan_group(*sides, its_nodes)
        for moves, some in zip(rounds, both, strict=True):
            for move in some:
                ranks = tuple(group[index] for index in move.destinations)
                moves.append(Move(group[move.source], move.box, ranks))
        local |= {group[index]: boxes for index, boxes in local_by_index.items() if boxes}
    column_of_rank = {}
    for index, rank in enumerate(r for group in groups for r in group):
        column_of_rank[rank] = index
    first, relayed = (chunk_moves(moves, column_of_rank, limit) for moves in rounds)
    return TensorPlan(first, relayed, local)


@lru_cache(maxsize=4096)
def _plan_group(
    have: tuple[Boxes, ...], need: tuple[Boxes, ...], nodes: tuple[int, ...] | None
) -> tuple[Moves, Moves, Mapping[int, Boxes]]:
    """Returns (moves, relayed moves, boxes that stay on their rank) in one group.

    Ranks are indices into the group. Without nodes, nothing is relayed. Cached, because the groups
    of different replicas need the same plan.
    """
    available, needed = (dict(enumerate(side)) for side in (have, need))
    if nodes is None:
        plan = redistribute(available, needed)
        return plan.moves, (), plan.retained
    plan, after = redistribute_through_nodes(available, needed, node_of=nodes.__getitem__)
    return plan.moves, after.moves, plan.retained
