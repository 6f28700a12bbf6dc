"""How weights reach generators in a step: mode, bytes by rank and edge, nodes crossed.

The figures are of one sync, by the planner that the ranks themselves use (`hybrid_engine.reshard`),
not by a formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from spmdflow.errors import ConfigError, PlanError
from spmdflow.hybrid_engine.factory import sync_mode
from spmdflow.hybrid_engine.reshard import Copies, ReshardPlan, generation_tables, plan_copies
from spmdflow.kind.engine import Sharding, engine_kind
from spmdflow.parallel.layout import Layout
from spmdflow.plan.record import BytesByEdge, Trace, TracedModel
from spmdflow.transfer.protocol import protocol
from spmdflow.transfer.register import method_spec
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import storage_numel

Nodes = Mapping[int, int]
"""The node of each rank."""
_Sent = tuple[int, Iterable[int], int]
"""Source, destinations and bytes of a message."""

MOST_RANKS, MOST_SHARDED_RANKS = 128, 16
"""Ranks up to which copies are planned box by box, and where every rank holds a shard of each
tensor: what takes a second or two. Beyond, ranks count as alike."""


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
    """How often it happens in the last traced step."""
    note: str = ""
    entering: Mapping[int, int] = field(default_factory=dict)
    """Bytes that come to each node from others; what several of its ranks receive comes once."""
    reported: int = 0
    """What rollout/synced_bytes of one sync is to say: bytes received by the ranks that answer."""
    copies: Copies | None = field(default=None, repr=False, compare=False)
    """What was planned box by box, for its proof; None: nothing was."""

    def of_messages(self, sent: Iterable[_Sent], ranks: Sequence[int], nodes: Nodes) -> WeightPlan:
        """With the bytes of messages to some of the ranks; each enters a node once."""
        received = dict.fromkeys(ranks, 0)
        edges: Counter[tuple[int, int]] = Counter()
        entering: Counter[int] = Counter()
        for source, destinations, size in sent:
            for rank in destinations:
                received[rank] += size
                edges[source, rank] += size
            for node in {nodes[rank] for rank in destinations} - {nodes[source]}:
                entering[node] += size
        far = sum(size for (source, rank), size in edges.items() if nodes[source] != nodes[rank])
        return replace(self, received=received, edges=edges, inter_bytes=far, entering=entering)


def weight_plans(trace: Trace) -> list[WeightPlan]:
    """How weights reach every model that generates."""
    syncs = syncs_by_step(trace, ("train", "eval"))[trace.steps[-1]] if trace.steps else {}
    policies = {generator: trace.models[policy] for policy, generator in trace.links}
    plans = []
    for name, traced in trace.models.items():
        policy = policies.get(name)
        if not traced.generates or (traced.only_generates and policy is None):
            continue  # its weights come from files
        try:
            plan = (
                _local(traced, trace.node_of)
                if policy is None
                else _boxes(policy, traced, trace.node_of)
            )
            ranks = traced.layout.ranks if policy is not None else _answering(traced)
            plan = replace(plan, reported=sum(plan.received[rank] for rank in ranks))
        except (ConfigError, PlanError) as err:
            plan = WeightPlan(name, name, "?", "?", note=f"not planned: {err}")
        plans.append(replace(plan, syncs=syncs.get(name, 0)))
    return plans


def syncs_by_step(trace: Trace, phases: Sequence[str] = ("train",)) -> dict[int, Counter[str]]:
    """How often weights pass to each model that generates in the calls of each step.

    A model's first generation, and the first one after an update, brings its weights along.
    """
    found: dict[int, Counter[str]] = {step: Counter() for step in trace.steps}
    fresh: set[str] = set()
    for order in trace.orders:
        name = order.model
        if order.operation != "call" or name not in trace.models:
            continue
        traced = trace.models[name]
        kind, comes = traced.kind_of(order.method), order.method == "receive_weights"
        if kind == "train":
            fresh -= {name, *_freed_by(traced, trace)}
        elif kind == "generate" and name not in fresh and not traced.only_generates:
            fresh.add(name)
            comes = True
        if comes and order.phase in phases:
            found.setdefault(order.step, Counter())[name] += 1
    return found


def _freed_by(trained: TracedModel, trace: Trace) -> Iterator[str]:
    """Models that lose generation's weights while another one is trained on their ranks."""
    for name, model in trace.models.items():
        if model.generates and not model.only_generates and model.pool == trained.pool:
            mode, layout = sync_mode(model.settings, model.layout), model.layout
            peers = len(layout.axis_group(layout.ranks[0], "micro_dp")) - 1
            if mode == "copy" or (mode == "blocks" and peers):
                yield name


def _answering(traced: TracedModel) -> tuple[int, ...]:
    """Ranks whose metrics of a generation count."""
    spec = method_spec(traced.worker_class, "generate_sequences")
    return tuple(protocol(spec.transfer_mode).collect(traced.layout).ranks)


def _sharding(cfg: Any) -> Sharding:
    return engine_kind(cfg.engine.kind).sharding_with(cfg.engine.options)


def _holders(traced: TracedModel) -> int:
    """Ranks that hold one copy together: neighbours."""
    layout = traced.layout
    sharded = layout.shard_size if _sharding(traced.settings).parameters else 1
    return layout.tp_size * layout.pp_size * sharded


def _local(traced: TracedModel, nodes: Nodes) -> WeightPlan:
    """To the generator on the trainer's own ranks."""
    cfg, layout = traced.settings, traced.layout
    mode = sync_mode(cfg, layout)
    if mode == "copy":
        return _boxes(traced, traced, nodes)
    element_bytes = getattr(torch, cfg.rollout.precision).itemsize
    architecture, distributed = Architecture.from_folder(cfg.model.path), _sharding(cfg).optimizer
    overlap = "overlap" in cfg.engine.options
    numel = storage_numel(architecture, layout, distributed_optimizer=distributed, overlap=overlap)
    groups = (group for group in layout.axis_groups("micro_dp") if len(group) > 1)
    sent = [
        (peer, [rank for rank in group if rank != peer], numel[peer] * element_bytes)
        for group in groups
        for peer in group
    ]
    plan = WeightPlan(traced.name, traced.name, mode, "micro_dp")
    return plan.of_messages(sent, layout.ranks, nodes)


def _boxes(policy: TracedModel, target: TracedModel, nodes: Nodes) -> WeightPlan:
    """From the boxes that ranks have and need; replicas that train and generate are alike."""
    cfg, training, generation = policy.settings, policy.layout, target.layout
    sharded = _sharding(cfg).parameters
    if policy is target and training.nests:
        # replicas generate inside of those that train
        ranks = training.ranks[: _holders(policy)]
        dp_size = len(ranks) // (training.tp_size * training.pp_size)
        training = generation = replace(training, ranks=ranks, dp_size=dp_size, shard_size=dp_size)
    most = MOST_SHARDED_RANKS if sharded else MOST_RANKS
    if len({*training.ranks, *generation.ranks}) > most:
        return _alike(policy, target, nodes, most=most)
    architecture = Architecture.from_folder(cfg.model.path)
    itemsize = getattr(torch, cfg.rollout.precision).itemsize
    copies = plan_copies(
        architecture, cfg, training=training, generation=generation, itemsize=itemsize
    )
    found = WeightPlan(policy.name, target.name, "copy", copies.plan.scope)
    sent = _messages(copies.plan, training, policy.layout)
    found = found.of_messages(sent, target.layout.ranks, nodes)
    return replace(found, copies=copies)


def _messages(plan: ReshardPlan, first: Layout, layout: Layout) -> Iterator[_Sent]:
    """Those of every replica, from the plan of the first one; first: layout, if all are in it."""
    for start in range(0, layout.size, first.size):
        shift = dict(zip(first.ranks, layout.ranks[start:], strict=False))
        for message in (message for bucket in plan.buckets for message in bucket.messages):
            source = shift.get(message.source, message.source)
            ranks = [shift.get(rank, rank) for rank in message.destinations]
            yield source, ranks, message.num_elements * plan.element_bytes


def _alike(policy: TracedModel, target: TracedModel, nodes: Nodes, *, most: int) -> WeightPlan:
    """Each rank receives what it needs, less the trainer's share of it that it holds."""
    cfg, training, generation = policy.settings, policy.layout, target.layout
    architecture = Architecture.from_folder(cfg.model.path)
    element_bytes = getattr(torch, cfg.rollout.precision).itemsize
    tables = generation_tables(architecture, generation, engine=cfg.rollout.generator)
    lacking = 1 - Fraction(1, _holders(policy)) if policy is target else Fraction(1)
    sizes: dict[int, int] = {}
    for table in tables.values():  # ranks that hold the same share a table
        if id(table) not in sizes:
            pieces = (piece for tensor in table.values() for piece in tensor.pieces)
            sizes[id(table)] = sum(piece.box.size for piece in pieces) * element_bytes
    received = {rank: int(sizes[id(table)] * lacking) for rank, table in tables.items()}
    note = f"ranks are taken as alike: more than {most} are not planned one by one"
    found = WeightPlan(policy.name, target.name, "copy", "pool", received, note=note)
    size = training.size
    if policy is not target or not size == generation.generation_dp_size <= MOST_RANKS:
        return found
    # each rank needs the whole model, and lacks what the others hold
    everyone = training.ranks
    sent = [(a, [b for b in everyone if b != a], received[a] // (size - 1)) for a in everyone]
    return found.of_messages(sent, everyone, nodes)
