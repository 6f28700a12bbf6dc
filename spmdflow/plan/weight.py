"""How weights reach generators in a step: mode, bytes by rank and by edge, bytes between nodes.

The numbers are of one sync. They come from the planner that the ranks themselves use
(`hybrid_engine.reshard`), not from a formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from spmdflow.errors import ConfigError, PlanError
from spmdflow.hybrid_engine.factory import sync_mode
from spmdflow.hybrid_engine.reshard import (
    Copies,
    Shards,
    boxes_of,
    generation_tables,
    plan_copies,
    sent_architecture,
    training_tables,
)
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.generator import generator_kind
from spmdflow.plan.record import BytesByEdge, Trace, TracedModel
from spmdflow.transfer.protocol import protocol
from spmdflow.weights.adapter import is_adapter, is_b
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import is_derived, storage_numel
from spmdflow.worker_api.register import method_spec

Nodes = Mapping[int, int]
"""The node of each rank."""
_DERIVED = (
    "not planned: the ranks of a replica divide a model whose table is not recorded; their own "
    "loader says at the start where they have each element, and the start checks that none is "
    "missing"
)
_Sent = tuple[int, Iterable[int], int]
"""Source, destinations and bytes of a message."""


@dataclass(frozen=True)
class WeightPlan:
    """How weights reach a generator before it generates."""

    source: str
    target: str
    """Models: the same, or a policy and its generator."""
    mode: str
    """blocks, flat, copy or adapter."""
    scope: str
    """Ranks that exchange weights: micro_dp, replica, shard or pool."""
    received: Mapping[int, int] = field(default_factory=dict)
    """Bytes that reach each rank over the wire."""
    edges: BytesByEdge = field(default_factory=dict)
    """The same by (source, destination)."""
    inter_bytes: int = -1
    """Bytes that ranks receive from other nodes; -1 if nothing is planned."""
    syncs: int = 0
    """Number of syncs in the last traced step."""
    note: str = ""
    is_derived: bool = False
    """Whether the generator's loader tells at the start which elements its ranks have. Nothing is
    planned then; the start refuses a table that does not have every element."""
    entering: Mapping[int, int] = field(default_factory=dict)
    """Bytes that each node receives from others. What several of its ranks receive counts once."""
    reported: int = 0
    """Expected rollout/synced_bytes of one sync: bytes that the ranks that reply receive."""
    parts: Copies | Shards | None = field(default=None, repr=False, compare=False)
    """The plan box by box or shard by shard, for its check; None if nothing is planned."""

    def with_messages(
        self, sent: Iterable[_Sent], ranks: Sequence[int], nodes: Nodes
    ) -> WeightPlan:
        """Return this plan with the bytes of these messages, by rank, by edge and by node.

        A message enters each other node once, however many of its ranks are destinations.
        ranks: all that may receive; those without a message get 0 bytes.
        """
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
    """Return how weights reach every model that generates; empty if all are loaded from files.

    A plan that ConfigError or PlanError prevents has mode "?" and the error in its note. So has one
    whose tables are only known at the start (`is_derived`), with the reason. `syncs` counts the
    last traced step, with its evaluation.
    """
    syncs = Counter[str]()
    if trace.steps:
        syncs = syncs_by_step(trace, ("train", "eval"))[trace.steps[-1]]
    policies = {generator: trace.models[policy] for policy, generator in trace.links}
    plans = []
    for name, traced in trace.models.items():
        policy = policies.get(name)
        if not traced.generates or (traced.only_generates and policy is None):
            continue  # its weights come from files
        source = policy or traced
        try:
            if _derives_table(source, traced):
                plan = WeightPlan(source.name, name, "?", "?", note=_DERIVED, is_derived=True)
                ranks: tuple[int, ...] = ()
            elif policy is None:
                plan = _plan_local_sync(traced, trace.node_of, gathers=_has_devices(trace))
                ranks = _reply_ranks(traced)
            else:
                plan = _plan_copy(policy, traced, trace.node_of)
                ranks = tuple(plan.received)
            plan = replace(plan, reported=sum(plan.received[rank] for rank in ranks))
        except (ConfigError, PlanError) as err:
            plan = WeightPlan(source.name, name, "?", "?", note=f"not planned: {err}")
        plans.append(replace(plan, syncs=syncs.get(name, 0)))
    return plans


def syncs_by_step(
    trace: Trace, phases: Sequence[str] = ("train",), *, synced: Iterable[str] = ()
) -> dict[int, Counter[str]]:
    """Return the number of weight syncs by step and by generating model, in calls of these phases.

    A model's first generation includes a sync, and so does the first one after an update that frees
    its generation weights or trains it. A separate generator is synced by each receive_weights.
    synced: models that were synced when a checkpoint was loaded.
    """
    counts: dict[int, Counter[str]] = {step: Counter() for step in trace.steps}
    fresh = set(synced)
    for call in trace.calls:
        name = call.model
        if call.operation != "call" or name not in trace.models:
            continue
        traced = trace.models[name]
        kind = traced.kind_of(call.method)
        is_sync = call.method == "receive_weights"
        if kind == "train":
            fresh -= {name, *_stale_models(traced, trace)}
        elif kind == "generate" and name not in fresh and not traced.only_generates:
            fresh.add(name)
            is_sync = True
        if is_sync and call.phase in phases:
            counts.setdefault(call.step, Counter())[name] += 1
    return counts


def _stale_models(trained: TracedModel, trace: Trace) -> Iterator[str]:
    """Yield the models whose generation weights are freed while `trained` trains on their ranks.

    These are generating trainers of the same pool in mode copy, or in mode blocks if several ranks
    exchange weights for generation.
    """
    for name, model in trace.models.items():
        if model.generates and not model.only_generates and model.pool == trained.pool:
            mode = sync_mode(model.settings, model.layout)
            layout = model.layout
            peers = len(layout.axis_group(layout.ranks[0], "gen_parts")) - 1
            if mode == "copy" or (mode == "blocks" and peers):
                yield name


def _derives_table(policy: TracedModel, target: TracedModel) -> bool:
    """Whether several ranks divide a model, and only their loader knows how."""
    cfg = policy.settings
    if target.layout.gen_tp_size * target.layout.gen_pp_size == 1:
        return False
    return is_derived(generator_kind(cfg.rollout.generator), sent_architecture(cfg))


def _reply_ranks(traced: TracedModel) -> tuple[int, ...]:
    """Ranks whose metrics of a generation count."""
    spec = method_spec(traced.worker_class, "generate_sequences")
    return tuple(protocol(spec.transfer_mode).collect(traced.layout).ranks)


def _has_devices(trace: Trace) -> bool:
    """Return whether the ranks have devices.

    They have if a process group has a backend other than gloo.
    """
    for call in trace.calls:
        if call.operation == "groups":
            for *_, backend in call.command["specs"] or ():
                if backend != "gloo":
                    return True
    return False


def _plan_local_sync(traced: TracedModel, nodes: Nodes, *, gathers: bool) -> WeightPlan:
    """Return the plan of a sync to a generator on the trainer's own ranks.

    Modes copy and adapter are planned by `_plan_copy`. In modes blocks and flat, each rank sends
    what it stores to the other ranks of its gen_parts group, which lies in a micro_dp group.
    gathers: in mode flat, this is one all-gather, in which shorter ranks are padded to the longest
    of the group.
    """
    cfg = traced.settings
    layout = traced.layout
    mode = sync_mode(cfg, layout)
    if mode in ("copy", "adapter"):
        return _plan_copy(traced, traced, nodes)
    element_bytes = getattr(torch, cfg.rollout.precision).itemsize
    architecture = Architecture.from_folder(cfg.model.path)
    sharding = engine_kind(cfg.engine.kind).sharding_with(cfg.engine.options)
    overlap = "overlap" in cfg.engine.options
    numel = storage_numel(
        architecture, layout, distributed_optimizer=sharding.optimizer, overlap=overlap
    )
    groups = layout.axis_groups("gen_parts")
    longest = {}
    for group in groups:
        for rank in group:
            longest[rank] = max(numel[peer] for peer in group)
    sizes = longest if mode == "flat" and gathers else numel
    sent = []
    for group in groups:
        for peer in group:
            if len(group) > 1:
                sent.append(
                    (peer, [rank for rank in group if rank != peer], sizes[peer] * element_bytes)
                )
    have = boxes_of(training_tables(architecture, layout, kind=cfg.engine.kind))
    need = boxes_of(generation_tables(architecture, layout, engine=cfg.rollout.generator))
    plan = WeightPlan(traced.name, traced.name, mode, "micro_dp", parts=Shards(groups, have, need))
    return plan.with_messages(sent, layout.ranks, nodes)


def _plan_copy(policy: TracedModel, target: TracedModel, nodes: Nodes) -> WeightPlan:
    """Return the plan of modes copy and adapter: each rank receives what it needs and lacks.

    Includes the messages for merging LoRA adapters on the policy's ranks. policy and target are the
    same model if it generates on its own ranks.
    """
    cfg = policy.settings
    copies = plan_copies(
        sent_architecture(cfg),
        cfg,
        training=policy.layout,
        generation=target.layout,
        itemsize=getattr(torch, cfg.rollout.precision).itemsize,
        node_of=nodes.__getitem__,
    )
    plan = copies.plan
    mode = "adapter" if cfg.rollout.weights == "adapter" else "copy"
    plan_of_boxes = WeightPlan(policy.name, target.name, mode, plan.scope, parts=copies)
    sent = (
        (move.source, move.destinations, move.box.size * plan.element_bytes * times)
        for move, times in plan.moves()
    )
    merging = list(_merge_messages(policy))
    ranks = sorted({*target.layout.ranks, *(rank for _, to, _ in merging for rank in to)})
    return plan_of_boxes.with_messages([*sent, *merging], ranks, nodes)


def _merge_messages(policy: TracedModel) -> Iterator[_Sent]:
    """Yield the messages that bring each whole adapter matrix A to the ranks that merge it.

    Each rank of a shard group sends its boxes, in float32, to the ranks of the group that lack
    them. Nothing is sent without LoRA, or if only adapters are sent (rollout.weights=adapter).
    """
    cfg = policy.settings
    layout = policy.layout
    lora = getattr(cfg.model, "lora", None)
    has_parts = engine_kind(cfg.engine.kind).cuts_model  # of A and B that fit those of the weight
    if lora is None or cfg.rollout.weights == "adapter" or has_parts:
        return
    architecture = replace(Architecture.from_folder(cfg.model.path), adapters=lora.adapters)
    boxes_by_rank = boxes_of(training_tables(architecture, layout, kind=cfg.engine.kind))
    for group in layout.axis_groups("shard"):
        for rank in group:
            for name, boxes in boxes_by_rank[rank].items():
                if is_adapter(name) and not is_b(name):
                    for box in boxes:
                        lacking = []
                        for peer in group:
                            if box not in boxes_by_rank[peer].get(name, ()):
                                lacking.append(peer)
                        yield rank, lacking, box.size * 4
