"""What a transition from training to generation costs, by system: the paper's Table 2, exactly.

Five systems, each as a `Cost` of bytes by rank, and the paper's formulas beside them (M: bytes of
the weights; N = t*p*d ranks; generation has t_g, p_g and d_g = t*p / (t_g*p_g) replicas for each
training replica):

| system | received per rank | peak | redundant |
|---|---|---|---|
| ds_chat: all-gather over all ranks, which train with M/N each | (N-1)/N M | M | M/N |
| hybridflow_v: all-gather over the replica | (tp-1)/(tp) M | M | M/(tp) |
| hybridflow, flat or blocks | (d_g-1)/(tp) M | M/(t_g p_g) | 0 |
| two_copies: a pool of its own (its ranks' means) | M/(t_g p_g) | M/(t_g p_g) | M/(t_g p_g) |
| shared: generation in the training layout | 0 | M/(tp) | 0 |

`hybridflow` in mode copy receives as much as flat; its generation weights are a second copy, so
M/(tp) is redundant. The formulas hold for the mean over ranks of `Amount.sharded`, the weights that
are divided over t and p; what else there is stands beside it under its name: norms and small biases
that every tensor-parallel rank holds, the second embedding of a tied model, and padding. Two things
are not in the formulas: vLLM's own copies of kv heads if there are fewer than t_g, and what a cut
inside a kv group (kv heads < t) makes mode copy send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from bench._amount import Amount, ByRank, received, staging_bytes, summed, together, weights
from spmdflow.errors import ConfigError
from spmdflow.hybrid_engine.reshard import (
    Groups,
    ReshardPlan,
    boxes_of,
    plan_reshard,
    scopes_of,
)
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import (
    BUCKET_BYTES,
    RankTables,
    buffer_offsets,
    default_vocab_multiple,
    megatron_tables,
    row_shards,
    storage_numel,
    vllm_tables,
    whole_tables,
)
from spmdflow.weights.table import ShardTable


@dataclass(frozen=True)
class ShardPlan:
    """Whole training shards, as their flat storages lie, inside micro-DP groups (flat, blocks).

    flat: each rank owns storage [len(group), row]; its shard is at the row of its place in the
    group; the transition is one in-place all-gather over the group, rows padded to `row_numel`, or
    a broadcast of each shard (gloo, where that is faster; padding then stays where it is).
    blocks: each rank of the group broadcasts its storage of `numel` elements to the others.
    """

    groups: tuple[tuple[int, ...], ...]
    numel: Mapping[int, int]
    """By rank: elements of its parameter storage, alignment included."""
    element_bytes: int

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The micro-DP group of a rank, ascending: the order of rows."""
        return next(group for group in self.groups if rank in group)

    def row_numel(self, rank: int) -> int:
        """flat: elements of a row, those of the group's largest shard."""
        return max(self.numel[peer] for peer in self.group_of(rank))

    def gather_bytes(self, rank: int) -> int:
        """Bytes that reach a rank by an all-gather: its peers' rows."""
        return self.element_bytes * (len(self.group_of(rank)) - 1) * self.row_numel(rank)

    def broadcast_bytes(self, rank: int) -> int:
        """Bytes that reach a rank by broadcasts: its peers' shards."""
        peers = [peer for peer in self.group_of(rank) if peer != rank]
        return self.element_bytes * sum(self.numel[peer] for peer in peers)


def plan_shards(layout: Layout, numel: Mapping[int, int], *, element_bytes: int) -> ShardPlan:
    """The plan of whole storages; numel: elements of each rank's parameter storage."""
    assert layout.nests, f"layout {layout}: shards of the trainer do not make generation shards"
    return ShardPlan(tuple(layout.axis_groups("micro_dp")), dict(numel), element_bytes)


@dataclass(frozen=True)
class Cost:
    """Bytes by rank of one system's transition, and the plan that it executes."""

    system: str
    mode: str
    """flat, blocks or copy for hybridflow; else empty."""
    received: ByRank
    """Over the wire, in one transition."""
    peak: ByRank
    """Weights that generation holds at the height of the transition, the training shard included
    only where it is part of them; `staging` comes on top."""
    redundant: ByRank
    """Weights held twice at that height: outside of what generation reads, or a second copy."""
    training: ByRank
    """Unique bytes of both kinds of weights while training; what only generation reads is freed."""
    generation: ByRank
    """The same while generating."""
    plan: ReshardPlan | ShardPlan | None
    """None: nothing moves."""
    have: RankTables
    """What each rank trains with."""
    need: RankTables
    """What the plan brings to each rank; empty where shards are used as they are."""

    @property
    def staging(self) -> Mapping[int, int]:
        """Bytes of buffers by rank, at most."""
        if not isinstance(self.plan, ReshardPlan):
            return dict.fromkeys(self.received, 0)
        return {rank: staging_bytes(self.plan, rank) for rank in self.received}

    def mean(self, what: str) -> Fraction:
        """Mean over the generation ranks of the sharded bytes of a field: the formula's figure."""
        amounts: ByRank = getattr(self, what)
        ranks = [rank for rank in amounts if self.peak[rank].total]
        return Fraction(sum(amounts[rank].sharded for rank in ranks), len(ranks))


@dataclass(frozen=True)
class Formula:
    """The paper's figures for one system, as parts of M, each a mean over ranks."""

    received: Fraction
    peak: Fraction
    redundant: Fraction


@dataclass(frozen=True)
class Case:
    """One transition to be costed. ConfigError from the tables if the model cannot be cut so."""

    arch: Architecture
    layout: Layout
    """Training sizes; its generation sizes are those of generation, also of a separate pool."""
    element_bytes: int = 4
    bucket_bytes: int = BUCKET_BYTES
    rollout: Layout | None = None
    """two_copies: the pool that generates; its tp and pp sizes are the generation sizes."""
    gathers_rows: bool = False
    """Whether flat moves padded rows by an all-gather (NCCL) instead of broadcasts (gloo)."""
    distributed_optimizer: bool = True
    """Whether Megatron's parameter buffers are padded for it."""

    @property
    def training(self) -> RankTables:
        """Megatron's tables."""
        return megatron_tables(self.arch, self.layout)

    @property
    def storage_numel(self) -> dict[int, int]:
        """Elements of each rank's parameter buffer."""
        return storage_numel(
            self.arch, self.layout, distributed_optimizer=self.distributed_optimizer
        )

    def buffer_places(self, table: ShardTable) -> tuple[dict[str, int], int]:
        """Where a rank's parameter buffer has each tensor of its table, and its elements."""
        aligned_over = self.layout.dp_size if self.distributed_optimizer else None
        shared = self.arch.tied and self.layout.pp_size > 1
        return buffer_offsets(table, aligned_over=aligned_over, shared_embedding=shared)


def cost_of(system: str, case: Case, *, mode: str = "") -> Cost:
    """The cost of a system; mode: flat, blocks or copy, for hybridflow only."""
    key = f"{system} {mode}".strip()
    if key not in _SYSTEMS:
        raise ConfigError(
            f"hybrid engine: got system {key!r}, expected one of {', '.join(_SYSTEMS)}; choose one"
        )
    return _SYSTEMS[key](case)


def paper(system: str, layout: Layout) -> Formula:
    """Table 2's row for the layout's training and generation sizes (the room's own for the two
    systems that have none, see the module)."""
    replica = layout.tp_size * layout.pp_size
    everyone = layout.size
    generation = Fraction(1, layout.gen_tp_size * layout.gen_pp_size)
    one = Fraction(1)
    return {
        "ds_chat": Formula(1 - one / everyone, one, one / everyone),
        "hybridflow_v": Formula(1 - one / replica, one, one / replica),
        "hybridflow": Formula(generation - one / replica, generation, 0 * one),
        "two_copies": Formula(generation, generation, generation),
        "shared": Formula(0 * one, one / replica, 0 * one),
    }[system]


def obstacle(case: Case) -> str | None:
    """Why the trainer's shards cannot be the generation weights (flat, blocks); None if they can.

    mode copy is always possible.
    """
    layout = case.layout
    vocab_size = case.arch.vocab_size
    if case.rollout is not None:
        return "generation has ranks of its own"
    if not layout.nests:
        return (
            f"t_g{layout.gen_tp_size} p_g{layout.gen_pp_size} does not divide t{layout.tp_size} "
            f"p{layout.pp_size}: a generation replica lies across training replicas"
        )
    ours, theirs = (-(-vocab_size // m) * m for m in (default_vocab_multiple(layout.tp_size), 64))
    if ours != theirs:
        return f"vocabulary {vocab_size} is padded to {ours} for training and to {theirs} by vLLM"
    return None


def _ds_chat(case: Case) -> Cost:
    """Training is sharded over all ranks, whatever t and p; the whole model is gathered."""
    ranks = case.layout.ranks
    have = {
        rank: row_shards(case.arch, shard_size=len(ranks), shard_rank=place)
        for place, rank in enumerate(ranks)
    }
    return _gathering("ds_chat", case, have, {"pool": [ranks]})


def _hybridflow_v(case: Case) -> Cost:
    """Contiguous generation groups: shards do not lie inside, so the replica gathers the model."""
    groups = case.layout.axis_groups("replica")
    return _gathering("hybridflow_v", case, case.training, {"replica": groups})


def _gathering(system: str, case: Case, have: RankTables, scopes: Mapping[str, Groups]) -> Cost:
    need = whole_tables(case.arch, case.layout)
    plan = _plan(case, have, need, scopes)
    held = _weights(case, have)
    whole = _weights(case, need)
    shard = _weights(case, vllm_tables(case.arch, case.layout))
    return Cost(
        system=system,
        mode="",
        received=_received(case, plan, have, need),
        peak=whole,
        redundant=held,
        training=held,
        generation=together(held, shard),
        plan=plan,
        have=have,
        need=need,
    )


def _flat(case: Case) -> Cost:
    """Every row of the storage is there in both phases."""
    return _one_copy(case, "flat")


def _blocks(case: Case) -> Cost:
    """Peers' shards are there for generation alone."""
    return _one_copy(case, "blocks")


def _one_copy(case: Case, mode: str) -> Cost:
    problem = obstacle(case)
    if problem is not None:
        raise ConfigError(
            f"hybrid engine: got mode {mode} where {problem}; expected shards of the trainer that "
            f"make generation shards; set rollout.weights=copy"
        )
    plan = plan_shards(case.layout, case.storage_numel, element_bytes=case.element_bytes)
    shard = _padded(case, plan.numel)
    row = shard
    if mode == "flat":
        row = _padded(case, {rank: plan.row_numel(rank) for rank in plan.numel})
    moved = row if case.gathers_rows else shard
    whole = {rank: summed(row[peer] for peer in plan.group_of(rank)) for rank in row}
    arriving = {rank: summed(moved[peer] for peer in plan.group_of(rank)) for rank in row}
    return Cost(
        system="hybridflow",
        mode=mode,
        received={rank: arriving[rank] - moved[rank] for rank in row},
        peak=whole,
        redundant=dict.fromkeys(row, Amount()),
        training=whole if mode == "flat" else row,
        generation=whole,
        plan=plan,
        have=case.training,
        need={},
    )


def _padded(case: Case, numel: Mapping[int, int]) -> ByRank:
    """The training shards in storages of so many elements."""
    return {
        rank: held + Amount(padding=numel[rank] * case.element_bytes - held.total)
        for rank, held in _weights(case, case.training).items()
    }


def _copy(case: Case) -> Cost:
    """vLLM's own layout on the same ranks, beside the training shards."""
    have = case.training
    need = vllm_tables(case.arch, case.layout)
    plan = _plan(case, have, need, scopes_of(case.layout, case.layout))
    held = _weights(case, have)
    shard = _weights(case, need)
    return Cost(
        system="hybridflow",
        mode="copy",
        received=_received(case, plan, have, need),
        peak=shard,
        redundant=held,
        training=held,
        generation=together(held, shard),
        plan=plan,
        have=have,
        need=need,
    )


def _two_copies(case: Case) -> Cost:
    """A pool trains, another generates."""
    if case.rollout is None or set(case.rollout.ranks) & set(case.layout.ranks):
        raise ConfigError(
            "hybrid engine: got two_copies without a rollout pool of its own, expected ranks "
            "outside of the trainer's; give `rollout`"
        )
    have = case.training
    need = vllm_tables(case.arch, case.rollout)
    plan = _plan(case, have, need, scopes_of(case.layout, case.rollout))
    nothing = dict.fromkeys((*case.layout.ranks, *case.rollout.ranks), Amount())
    held = {**nothing, **_weights(case, have)}
    shard = {**nothing, **_weights(case, need)}
    return Cost(
        system="two_copies",
        mode="",
        received={**nothing, **_received(case, plan, have, need)},
        peak=shard,
        redundant=shard,
        training=together(held, shard),
        generation=together(held, shard),
        plan=plan,
        have=have,
        need=need,
    )


def _shared(case: Case) -> Cost:
    """Generation by the training model itself, in its layout."""
    held = _weights(case, case.training)
    nothing = dict.fromkeys(held, Amount())
    return Cost("shared", "", nothing, held, nothing, held, held, None, case.training, {})


_SYSTEMS: Mapping[str, Callable[[Case], Cost]] = {
    "ds_chat": _ds_chat,
    "hybridflow_v": _hybridflow_v,
    "hybridflow flat": _flat,
    "hybridflow blocks": _blocks,
    "hybridflow copy": _copy,
    "two_copies": _two_copies,
    "shared": _shared,
}
SYSTEMS = tuple(_SYSTEMS)
"""What the benchmark sets side by side: a system, and for hybridflow a mode."""


def _plan(
    case: Case,
    have: RankTables,
    need: RankTables,
    scopes: Mapping[str, Groups],
) -> ReshardPlan:
    return plan_reshard(
        boxes_of(have),
        boxes_of(need),
        scopes=scopes,
        element_bytes=case.element_bytes,
        bucket_bytes=case.bucket_bytes,
    )


def _weights(case: Case, tables: RankTables) -> ByRank:
    return weights(case.arch, tables, element_bytes=case.element_bytes)


def _received(case: Case, plan: ReshardPlan, have: RankTables, need: RankTables) -> ByRank:
    return received(case.arch, plan, have, need)
