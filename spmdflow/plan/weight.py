"""Weights that pass from trainer to generator in a step: mode, bytes by rank, nodes crossed.

The figures are the planner's that the ranks themselves use (`hybrid_engine.reshard`, `.table`), not
a formula: what each rank receives in one sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from spmdflow.errors import ConfigError, PlanError
from spmdflow.hybrid_engine.factory import sync_mode
from spmdflow.hybrid_engine.reshard import (
    BoxesByRank,
    ReshardPlan,
    boxes_of,
    plan_reshard,
    scopes_of,
)
from spmdflow.hybrid_engine.table import generation_tables, storage_numel, training_tables
from spmdflow.kind.engine import Sharding, engine_kind
from spmdflow.models.generator import GeneratorWorker
from spmdflow.parallel.layout import Layout
from spmdflow.plan.record import BytesByEdge, Trace, TracedModel, TracedOrder
from spmdflow.plan.workload import kind_of, settings_of
from spmdflow.transfer.protocol import protocol
from spmdflow.transfer.register import method_spec
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import BUCKET_BYTES

Nodes = Mapping[int, int]
"""The node of each rank."""

MOST_RANKS, MOST_SHARDED_RANKS = 128, 16
"""Ranks up to which copies are planned box by box, and where every rank holds a shard of each
tensor: what takes a second or two. Beyond, ranks count as alike."""


@dataclass(frozen=True)
class Copies:
    """A plan of boxes, and what it was made from."""

    plan: ReshardPlan
    have: BoxesByRank
    need: BoxesByRank


@dataclass(frozen=True)
class WeightPlan:
    """How weights reach a generator before it generates."""

    source: str
    target: str
    """Models: the same, or a policy and its generator."""
    mode: str
    """blocks, flat or copy."""
    scope: str
    """Ranks that exchange weights: micro_dp, replica, shard or pool."""
    received: Mapping[int, int] = field(default_factory=dict)
    """Bytes that reach each rank over the wire."""
    edges: BytesByEdge = field(default_factory=dict)
    """The same by (source, destination); empty where `inter_bytes` is -1."""
    inter_bytes: int = -1
    """Of all ranks' bytes, those from another node; -1: not told apart."""
    syncs: int = 0
    """How often it happens in the step."""
    note: str = ""
    entering: Mapping[int, int] = field(default_factory=dict)
    """Bytes that come to each node from others; what several of its ranks receive comes once."""
    reported: int = 0
    """What rollout/synced_bytes of one sync is to say: bytes received by the ranks that answer."""
    copies: Copies | None = field(default=None, repr=False, compare=False)
    """What was planned box by box, for its proof; None: nothing was."""

    def over(self, edges: BytesByEdge, ranks: Sequence[int], nodes: Nodes) -> WeightPlan:
        """With the bytes of ranks that receive, known by edge; what a rank sends to several of a
        node is the same and enters it once."""
        received = dict.fromkeys(ranks, 0)
        crossing: dict[tuple[int, int], int] = {}
        for (peer, rank), size in edges.items():
            received[rank] += size
            if nodes[peer] != nodes[rank]:
                way = peer, nodes[rank]
                crossing[way] = max(crossing.get(way, 0), size)
        far = sum(size for (peer, rank), size in edges.items() if nodes[peer] != nodes[rank])
        entering = _by_node(crossing)
        return replace(self, received=received, edges=edges, inter_bytes=far, entering=entering)


def weight_plans(trace: Trace, orders: Sequence[TracedOrder] = ()) -> list[WeightPlan]:
    """How weights reach every model that generates; orders: of the step whose syncs count."""
    nodes = dict(zip(trace.world, trace.nodes, strict=True))
    plans = []
    for name, traced in trace.models.items():
        policy = next((trace.models[p] for p, generator in trace.links if generator == name), None)
        if not hasattr(traced.worker_class, "generate_sequences"):
            continue
        if not hasattr(settings_of(traced), "rollout") or (
            policy is None and _only_generates(traced)
        ):
            continue  # its weights come from files
        try:
            if policy is None:
                plan, ranks = _local(traced, nodes), _answering(traced)
            else:
                plan = _boxes(policy, traced, nodes)
                ranks = traced.layout.ranks
            plan = replace(plan, reported=sum(plan.received[rank] for rank in ranks))
        except (ConfigError, PlanError) as err:
            plan = WeightPlan(name, name, "?", "?", note=f"not planned: {err}")
        labels = [order.label for order in orders if order.operation == "call"]
        calls = [label for label in labels if label.startswith(f"{name}.")]
        syncs = calls.count(f"{name}.receive_weights")
        if policy is None:
            syncs = int(any(_kind(traced, label) == "generate" for label in calls))
        plans.append(replace(plan, syncs=syncs))
    return plans


def syncs_by_step(trace: Trace) -> dict[int, dict[str, int]]:
    """How often weights pass to each model that generates in the training calls of each step.

    A model's first generation, and the first one after an update, brings its weights along.
    """
    found: dict[int, dict[str, int]] = {step: {} for step in trace.steps}
    fresh: set[str] = set()
    for order in trace.orders:
        name, _, method = order.label.partition(".")
        if order.operation != "call" or name not in trace.models:
            continue
        kind = _kind(trace.models[name], order.label)
        comes = method == "receive_weights"
        if kind == "train":
            fresh.discard(name)
        elif kind == "generate" and name not in fresh and not _only_generates(trace.models[name]):
            fresh.add(name)
            comes = True
        if comes and order.phase == "train":
            step = found.setdefault(order.step, {})
            step[name] = step.get(name, 0) + 1
    return found


def _kind(traced: TracedModel, label: str) -> str:
    return kind_of(method_spec(traced.worker_class, label.partition(".")[2]))


def _only_generates(traced: TracedModel) -> bool:
    return issubclass(traced.worker_class, GeneratorWorker)


def _answering(traced: TracedModel) -> tuple[int, ...]:
    """Ranks whose metrics of a generation count."""
    spec = method_spec(traced.worker_class, "generate_sequences")
    return tuple(protocol(spec.transfer_mode).collect(traced.layout).ranks)


def _sharding(cfg: Any) -> Sharding:
    return engine_kind(cfg.engine.kind).sharding_with(cfg.engine.options)


def _local(traced: TracedModel, nodes: Nodes) -> WeightPlan:
    """To the generator on the trainer's own ranks."""
    cfg, layout, name = settings_of(traced), traced.layout, traced.name
    mode = sync_mode(cfg, layout)
    if mode == "copy":
        return _boxes(traced, traced, nodes)
    element_bytes = getattr(torch, cfg.rollout.dtype).itemsize
    architecture, distributed = Architecture.from_folder(cfg.model.path), _sharding(cfg).optimizer
    numel = storage_numel(architecture, layout, distributed_optimizer=distributed)
    edges = {
        (peer, rank): numel[peer] * element_bytes
        for group in layout.axis_groups("micro_dp")
        for rank in group
        for peer in group
        if peer != rank
    }
    return WeightPlan(name, name, mode, "micro_dp").over(edges, layout.ranks, nodes)


def _boxes(policy: TracedModel, target: TracedModel, nodes: Nodes) -> WeightPlan:
    """From the boxes that ranks have and need; replicas that train and generate are alike."""
    cfg, training, generation = settings_of(policy), policy.layout, target.layout
    sharded = _sharding(cfg).parameters
    if (
        policy is target and training.nests and not sharded
    ):  # they generate inside of one that trains
        ranks = training.ranks[: training.tp_size * training.pp_size]
        training = generation = replace(training, ranks=ranks, dp_size=1, shard_size=1)
    architecture = Architecture.from_folder(cfg.model.path)
    element_bytes = getattr(torch, cfg.rollout.dtype).itemsize
    found = WeightPlan(policy.name, target.name, "copy", "pool")
    most = MOST_SHARDED_RANKS if sharded else MOST_RANKS
    if len({*training.ranks, *generation.ranks}) > most:
        received = _alike(architecture, policy, target, element_bytes=element_bytes)
        note = f"ranks are taken as alike: more than {most} are not planned one by one"
        found = replace(found, received=received, note=note)
        size, generates = training.size, generation.generation_dp_size
        if policy is target and size == generates <= MOST_RANKS:
            # each rank lacks what the others hold
            pairs = [(peer, rank) for rank in training.ranks for peer in training.ranks]
            shares = {(a, b): received[b] // (size - 1) for a, b in pairs if a != b}
            return found.over(shares, training.ranks, nodes)
        return found
    have = boxes_of(training_tables(architecture, training, kind=cfg.engine.kind))
    need = boxes_of(generation_tables(architecture, generation, engine=cfg.rollout.engine))
    plan = plan_reshard(
        have,
        need,
        scopes=scopes_of(training, generation),
        element_bytes=element_bytes,
        bucket_bytes=BUCKET_BYTES,
    )
    edges: dict[tuple[int, int], int] = {}
    crossing: dict[tuple[int, int], int] = {}
    for shift in _shifts(training, policy.layout):
        for message in (m for bucket in plan.buckets for m in bucket.messages):
            source = shift.get(message.source, message.source)
            destinations = [shift.get(rank, rank) for rank in message.destinations]
            size = message.num_elements * element_bytes
            for rank in destinations:
                edges[source, rank] = edges.get((source, rank), 0) + size
            for node in {nodes[rank] for rank in destinations} - {nodes[source]}:
                crossing[source, node] = crossing.get((source, node), 0) + size
    found = replace(found, scope=plan.scope).over(edges, target.layout.ranks, nodes)
    return replace(found, entering=_by_node(crossing), copies=Copies(plan, have, need))


def _shifts(first: Layout, layout: Layout) -> Iterator[Mapping[int, int]]:
    """The ranks of the first replica as those of each; empty if all are planned together."""
    if first == layout:
        yield {}
        return
    for start in range(0, layout.size, first.size):
        yield dict(zip(first.ranks, layout.ranks[start : start + first.size], strict=True))


def _by_node(crossing: Mapping[tuple[int, int], int]) -> dict[int, int]:
    """Bytes by node, of those by (source, node)."""
    found: dict[int, int] = {}
    for (_, node), size in crossing.items():
        found[node] = found.get(node, 0) + size
    return found


def _alike(
    architecture: Architecture, policy: TracedModel, target: TracedModel, *, element_bytes: int
) -> dict[int, int]:
    """Bytes that reach each rank: what it needs, less the trainer's share of it that it holds."""
    cfg, training = settings_of(policy), policy.layout
    tables = generation_tables(architecture, target.layout, engine=cfg.rollout.engine)
    replica = training.tp_size * training.pp_size
    holders = training.size if _sharding(cfg).parameters else replica
    lacking = 1 - Fraction(1, holders) if policy is target else Fraction(1)
    sizes: dict[int, int] = {}
    for table in tables.values():  # ranks that hold the same share a table
        if id(table) not in sizes:
            pieces = (piece for tensor in table.values() for piece in tensor.pieces)
            sizes[id(table)] = sum(piece.box.size for piece in pieces) * element_bytes
    return {rank: int(sizes[id(table)] * lacking) for rank, table in tables.items()}
