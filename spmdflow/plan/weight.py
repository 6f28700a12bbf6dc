"""Weights that pass from trainer to generator in a step: mode, bytes by rank, nodes crossed.

The figures are the planner's that the ranks themselves use (`hybrid_engine.reshard`, `.cost`), not
a formula: what each rank receives in one sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from spmdflow.blocks.plan import PlanError
from spmdflow.errors import ConfigError
from spmdflow.hybrid_engine.amount import weights
from spmdflow.hybrid_engine.cost import Case
from spmdflow.hybrid_engine.factory import sync_mode
from spmdflow.hybrid_engine.reshard import boxes_of, plan_reshard, plan_shards, scopes_of
from spmdflow.hybrid_engine.stream import BUCKET_BYTES
from spmdflow.hybrid_engine.table import generation_tables, training_tables
from spmdflow.parallel.layout import Layout
from spmdflow.plan.record import Trace, TracedModel
from spmdflow.plan.workload import settings_of
from spmdflow.rollout.vllm import VLLM_TRANSFER
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import parameters

Edge = tuple[int, int]
Nodes = Mapping[int, int]
"""The machine of each rank."""

MOST_RANKS, MOST_SHARDED_RANKS = 128, 16
"""Ranks up to which copies are planned box by box, and where every rank holds a shard of each
tensor: what takes a second or two. Beyond, ranks count as alike."""
_SHARDED = ("fsdp", "zero2", "zero3")


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


def weight_plans(trace: Trace, syncs: Mapping[str, int]) -> list[WeightPlan]:
    """The ways of all models that generate; syncs: by the model's name."""
    nodes = dict(zip(trace.world, trace.nodes, strict=True))
    plans = []
    for name, traced in trace.models.items():
        cfg = settings_of(traced)
        linked = [policy for policy, generator in trace.links if generator == name]
        if not hasattr(traced.worker_class, "generate_sequences") or not hasattr(cfg, "rollout"):
            continue
        try:
            if linked:
                plans.append(_remote(trace.models[linked[0]], traced, nodes, syncs))
            else:
                plans.append(_local(traced, cfg, nodes, syncs.get(name, 0)))
        except (ConfigError, PlanError) as err:
            why = f"not planned: {err}"
            plans.append(WeightPlan(name, name, "?", "?", {}, {}, -1, syncs.get(name, 0), why))
    return plans


def _local(traced: TracedModel, cfg: Any, nodes: Nodes, syncs: int) -> WeightPlan:
    layout, mode = traced.layout, sync_mode(cfg, traced.layout)
    element_bytes = getattr(torch, cfg.rollout.dtype).itemsize
    name = traced.name
    if mode not in ("copy", VLLM_TRANSFER):
        architecture = Architecture.from_folder(cfg.model.path)
        case = Case(
            architecture,
            layout,
            element_bytes=element_bytes,
            distributed_optimizer="plain_optimizer" not in cfg.engine.options,
        )
        plan = plan_shards(layout, case.storage_numel, element_bytes=element_bytes)
        edges = {
            (peer, rank): plan.numel[peer] * element_bytes
            for group in plan.groups
            for rank in group
            for peer in group
            if peer != rank
        }
        return _of_edges(name, name, mode, "micro_dp", layout.ranks, edges, nodes, syncs)
    if cfg.engine.kind not in _SHARDED and layout.pp_size == layout.tp_size == 1:
        note = "every rank has all weights"
        return _of_edges(name, name, "copy", "rank", layout.ranks, {}, nodes, syncs, note)
    if layout.pp_size == layout.tp_size == 1 and layout.generation_dp_size == layout.size:
        return _whole(name, cfg, layout, element_bytes, nodes, syncs)
    return _boxes(name, name, cfg, layout, layout, nodes, syncs)


def _whole(
    name: str,
    cfg: Any,
    layout: Layout,
    element_bytes: int,
    nodes: Nodes,
    syncs: int,
) -> WeightPlan:
    """Tensor by tensor from data-parallel shards: each rank lacks what the others hold."""
    architecture = Architecture.from_folder(cfg.model.path)
    total = sum(_numel(parameter.shape) for parameter in parameters(architecture)) * element_bytes
    note = "tensor by tensor; shards of a tensor are taken as equal"
    if layout.size > MOST_RANKS:
        received = dict.fromkeys(layout.ranks, total * (layout.size - 1) // layout.size)
        return WeightPlan(name, name, "copy", "pool", received, {}, -1, syncs, note)
    edges = {
        (peer, rank): total // layout.size
        for rank in layout.ranks
        for peer in layout.ranks
        if peer != rank
    }
    return _of_edges(name, name, "copy", "pool", layout.ranks, edges, nodes, syncs, note)


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
    return WeightPlan(source, target, mode, scope, received, edges, far, syncs, note)


def _boxes(
    source: str,
    target: str,
    cfg: Any,
    training: Layout,
    generation: Layout,
    nodes: Nodes,
    syncs: int,
) -> WeightPlan:
    """From the boxes that ranks have and need; replicas that train and generate are alike."""
    whole = training, generation
    if training == generation and training.nests:
        training = generation = _first_replica(training)
    architecture, kind = Architecture.from_folder(cfg.model.path), cfg.engine.kind
    element_bytes = getattr(torch, cfg.rollout.dtype).itemsize
    most = MOST_SHARDED_RANKS if kind in _SHARDED else MOST_RANKS
    if len({*training.ranks, *generation.ranks}) > most:
        received = _alike(architecture, cfg, *whole, element_bytes=element_bytes)
        note = f"ranks are taken as alike: more than {most} are not planned one by one"
        return WeightPlan(source, target, "copy", "pool", received, {}, -1, syncs, note)
    plan = plan_reshard(
        boxes_of(training_tables(architecture, training, kind=kind)),
        boxes_of(generation_tables(architecture, generation, engine=cfg.rollout.engine)),
        scopes=scopes_of(training, generation),
        element_bytes=element_bytes,
        bucket_bytes=BUCKET_BYTES,
    )
    edges: dict[Edge, int] = {}
    for bucket in plan.buckets:
        for message in bucket.messages:
            for rank in message.destinations:
                pair = message.source, rank
                edges[pair] = edges.get(pair, 0) + message.num_elements * element_bytes
    if training != whole[0]:
        edges = _of_every_replica(edges, training, whole[0])
    return _of_edges(source, target, "copy", plan.scope, whole[1].ranks, edges, nodes, syncs)


def _first_replica(layout: Layout) -> Layout:
    """The ranks of one training replica, in which all its generation replicas nest."""
    ranks = layout.ranks[: layout.tp_size * layout.pp_size]
    return replace(layout, ranks=ranks, dp_size=1, shard_size=1)


def _of_every_replica(edges: Mapping[Edge, int], first: Layout, layout: Layout) -> dict[Edge, int]:
    """Edges of the first replica and the same ones of all others, whose ranks follow it."""
    place = {rank: number for number, rank in enumerate(first.ranks)}
    return {
        (layout.ranks[start + place[source]], layout.ranks[start + place[rank]]): num_bytes
        for start in range(0, layout.size, first.size)
        for (source, rank), num_bytes in edges.items()
    }


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
    needed = weights(architecture, tables, element_bytes=element_bytes)
    replica = training.tp_size * training.pp_size
    holders = training.size if cfg.engine.kind in _SHARDED else replica
    lacking = 1 - Fraction(1, holders) if training == generation else Fraction(1)
    return {rank: int((amount.total - amount.padding) * lacking) for rank, amount in needed.items()}


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


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total
