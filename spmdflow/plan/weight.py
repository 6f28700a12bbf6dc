"""Weights that pass from trainer to generator in a step: mode, bytes by rank, nodes crossed.

The figures are the planner's that the ranks themselves use (`hybrid_engine.reshard`, `.table`), not
a formula: what each rank receives in one sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from spmdflow.blocks.plan import PlanError
from spmdflow.errors import ConfigError
from spmdflow.hybrid_engine.factory import sync_mode
from spmdflow.hybrid_engine.reshard import boxes_of, plan_reshard, scopes_of
from spmdflow.hybrid_engine.stream import BUCKET_BYTES
from spmdflow.hybrid_engine.table import generation_tables, storage_numel, training_tables
from spmdflow.kind.engine import Sharding, engine_kind
from spmdflow.models.generator import GeneratorWorker
from spmdflow.parallel.layout import Layout
from spmdflow.plan.record import Trace, TracedModel
from spmdflow.plan.reshard import Copies
from spmdflow.plan.workload import kind_of, settings_of
from spmdflow.transfer.protocol import protocol
from spmdflow.transfer.register import method_spec
from spmdflow.weights.architecture import Architecture

Edge = tuple[int, int]
Nodes = Mapping[int, int]
"""The machine of each rank."""

MOST_RANKS, MOST_SHARDED_RANKS = 128, 16
"""Ranks up to which copies are planned box by box, and where every rank holds a shard of each
tensor: what takes a second or two. Beyond, ranks count as alike."""


@dataclass(frozen=True)
class WeightPlan:
    """One way of weights, as it is gone before a generation."""

    source: str
    target: str
    """Models: the same, or a policy and its generator."""
    mode: str
    """blocks, flat or copy."""
    scope: str
    """Ranks that exchange weights: micro_dp, replica, shard or pool."""
    received: Mapping[int, int]
    """Bytes that reach each rank over the wire."""
    edges: Mapping[Edge, int]
    """The same by (source, destination); empty where `inter_bytes` is -1."""
    inter_bytes: int
    """Of all ranks' bytes, those from another node; -1: not told apart."""
    syncs: int
    """How often it happens in the step."""
    note: str = ""
    entering: Mapping[int, int] = field(default_factory=dict)
    """Bytes that come to each machine from others; what several of its ranks receive comes once."""
    reported: int = 0
    """What rollout/synced_bytes of one sync is to say: bytes received by the ranks that answer."""
    copies: Copies | None = field(default=None, repr=False, compare=False)
    """What was planned box by box, for its proof; None: nothing was."""


def weight_plans(trace: Trace, syncs: Mapping[str, int]) -> list[WeightPlan]:
    """The ways of all models that generate; syncs: by the model's name."""
    nodes = dict(zip(trace.world, trace.nodes, strict=True))
    plans = []
    for name, traced in trace.models.items():
        cfg = settings_of(traced)
        linked = [policy for policy, generator in trace.links if generator == name]
        if not hasattr(traced.worker_class, "generate_sequences") or not hasattr(cfg, "rollout"):
            continue
        if not linked and _only_generates(traced):
            continue  # its weights come from files
        try:
            if linked:
                plan = _remote(trace.models[linked[0]], traced, nodes, syncs)
                ranks = traced.layout.ranks
            else:
                plan, ranks = _local(traced, cfg, nodes, syncs.get(name, 0)), _answering(traced)
            plans.append(replace(plan, reported=sum(plan.received[rank] for rank in ranks)))
        except (ConfigError, PlanError) as err:
            why = f"not planned: {err}"
            plans.append(WeightPlan(name, name, "?", "?", {}, {}, -1, syncs.get(name, 0), why))
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
        kind = kind_of(method_spec(trace.models[name].worker_class, method))
        comes = method == "receive_weights"
        if kind == "train":
            fresh.discard(name)
        elif _only_generates(trace.models[name]):
            pass
        elif kind == "generate" and name not in fresh:
            fresh.add(name)
            comes = True
        if comes and order.phase == "train":
            step = found.setdefault(order.step, {})
            step[name] = step.get(name, 0) + 1
    return found


def _only_generates(traced: TracedModel) -> bool:
    return issubclass(traced.worker_class, GeneratorWorker)


def _local(traced: TracedModel, cfg: Any, nodes: Nodes, syncs: int) -> WeightPlan:
    layout, mode = traced.layout, sync_mode(cfg, traced.layout)
    element_bytes = getattr(torch, cfg.rollout.dtype).itemsize
    name = traced.name
    if mode != "copy":
        architecture = Architecture.from_folder(cfg.model.path)
        distributed = _sharding(cfg).optimizer
        numel = storage_numel(architecture, layout, distributed_optimizer=distributed)
        edges = {
            (peer, rank): numel[peer] * element_bytes
            for group in layout.axis_groups("micro_dp")
            for rank in group
            for peer in group
            if peer != rank
        }
        return _of_edges(name, name, mode, "micro_dp", layout.ranks, edges, nodes, syncs)
    return _boxes(name, name, cfg, layout, layout, nodes, syncs)


def _sharding(cfg: Any) -> Sharding:
    return engine_kind(cfg.engine.kind).sharding_with(cfg.engine.options)


def _answering(traced: TracedModel) -> tuple[int, ...]:
    """Ranks whose metrics of a generation count."""
    spec = method_spec(traced.worker_class, "generate_sequences")
    return tuple(protocol(spec.transfer_mode).collect(traced.layout).ranks)


def _of_edges(
    source: str,
    target: str,
    mode: str,
    scope: str,
    ranks: tuple[int, ...],
    edges: Mapping[Edge, int],
    nodes: Nodes,
    syncs: int,
    note: str = "",
) -> WeightPlan:
    """A way whose bytes are known by edge; ranks: that receive."""
    received = dict.fromkeys(ranks, 0)
    for (_, rank), size in edges.items():
        received[rank] += size
    far = sum(size for (peer, rank), size in edges.items() if nodes[peer] != nodes[rank])
    crossing: dict[tuple[int, int], int] = {}
    for (peer, rank), size in edges.items():  # a shard is the same for all who receive it
        if nodes[peer] != nodes[rank]:
            way = peer, nodes[rank]
            crossing[way] = max(crossing.get(way, 0), size)
    entering = _by_node(crossing)
    return WeightPlan(source, target, mode, scope, received, edges, far, syncs, note, entering)


def _by_node(crossing: Mapping[tuple[int, int], int]) -> dict[int, int]:
    """Bytes by machine, of those by (source, machine)."""
    found: dict[int, int] = {}
    for (_, node), size in crossing.items():
        found[node] = found.get(node, 0) + size
    return found


def _boxes(
    source_name: str,
    target: str,
    cfg: Any,
    training: Layout,
    generation: Layout,
    nodes: Nodes,
    syncs: int,
) -> WeightPlan:
    """From the boxes that ranks have and need; replicas that train and generate are alike."""
    whole, sharded = (training, generation), _sharding(cfg).parameters
    if training == generation and training.nests and not sharded:
        training = generation = _first_replica(training)
    architecture = Architecture.from_folder(cfg.model.path)
    element_bytes = getattr(torch, cfg.rollout.dtype).itemsize
    most = MOST_SHARDED_RANKS if sharded else MOST_RANKS
    if len({*training.ranks, *generation.ranks}) > most:
        received = _alike(architecture, cfg, *whole, element_bytes=element_bytes)
        note = f"ranks are taken as alike: more than {most} are not planned one by one"
        if whole[0] == whole[1] and training.size == generation.generation_dp_size <= MOST_RANKS:
            # each rank lacks what the others hold
            ranks = training.ranks
            share = {rank: received[rank] // (len(ranks) - 1) for rank in ranks}
            pairs = [(peer, rank) for rank in ranks for peer in ranks if peer != rank]
            alike = {pair: share[pair[1]] for pair in pairs}
            return _of_edges(source_name, target, "copy", "pool", ranks, alike, nodes, syncs, note)
        return WeightPlan(source_name, target, "copy", "pool", received, {}, -1, syncs, note)
    have = boxes_of(training_tables(architecture, training, kind=cfg.engine.kind))
    need = boxes_of(generation_tables(architecture, generation, engine=cfg.rollout.engine))
    plan = plan_reshard(
        have,
        need,
        scopes=scopes_of(training, generation),
        element_bytes=element_bytes,
        bucket_bytes=BUCKET_BYTES,
    )
    edges: dict[Edge, int] = {}
    crossing: dict[Edge, int] = {}
    for shift in _shifts(training, whole[0]):
        for message in (m for bucket in plan.buckets for m in bucket.messages):
            source, size = shift[message.source], message.num_elements * element_bytes
            destinations = [shift[rank] for rank in message.destinations]
            for rank in destinations:
                edges[source, rank] = edges.get((source, rank), 0) + size
            for node in {nodes[rank] for rank in destinations} - {nodes[source]}:
                crossing[source, node] = crossing.get((source, node), 0) + size
    found = _of_edges(source_name, target, "copy", plan.scope, whole[1].ranks, edges, nodes, syncs)
    return replace(found, entering=_by_node(crossing), copies=Copies(plan, have, need))


def _first_replica(layout: Layout) -> Layout:
    """The ranks of one training replica, in which all its generation replicas nest."""
    ranks = layout.ranks[: layout.tp_size * layout.pp_size]
    return replace(layout, ranks=ranks, dp_size=1, shard_size=1)


def _shifts(first: Layout, layout: Layout) -> Iterator[Mapping[int, int]]:
    """The ranks of the first replica as those of each replica; all ranks as they are, if planned
    all together."""
    if first == layout:
        yield _Same()
        return
    for start in range(0, layout.size, first.size):
        yield dict(zip(first.ranks, layout.ranks[start : start + first.size], strict=True))


class _Same(dict[int, int]):
    """Every rank as itself."""

    def __missing__(self, rank: int) -> int:
        return rank


def _alike(
    architecture: Architecture,
    cfg: Any,
    training: Layout,
    generation: Layout,
    *,
    element_bytes: int,
) -> dict[int, int]:
    """Bytes that reach each rank: what it needs, less the trainer's share of it that it holds."""
    tables = generation_tables(architecture, generation, engine=cfg.rollout.engine)
    replica = training.tp_size * training.pp_size
    holders = training.size if _sharding(cfg).parameters else replica
    lacking = 1 - Fraction(1, holders) if training == generation else Fraction(1)
    sizes: dict[int, int] = {}
    for table in tables.values():  # ranks that hold the same share a table
        if id(table) not in sizes:
            pieces = (piece for tensor in table.values() for piece in tensor.pieces)
            sizes[id(table)] = sum(piece.box.size for piece in pieces) * element_bytes
    return {rank: int(sizes[id(table)] * lacking) for rank, table in tables.items()}


def _remote(
    policy: TracedModel,
    generator: TracedModel,
    nodes: Nodes,
    syncs: Mapping[str, int],
) -> WeightPlan:
    return _boxes(
        policy.name,
        generator.name,
        settings_of(policy),
        policy.layout,
        generator.layout,
        nodes,
        syncs.get(generator.name, 0),
    )
