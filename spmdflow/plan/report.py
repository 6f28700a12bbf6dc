"""`PlanReport`: everything that a plan shows, put together from the record of a dry run."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

from spmdflow.config.check import faults
from spmdflow.mapping.machine import Hardware
from spmdflow.parallel.group import GroupSpec
from spmdflow.parallel.layout import Layout
from spmdflow.plan.check import check_members, check_rows
from spmdflow.plan.prediction import Prediction, predict
from spmdflow.plan.record import (
    COMPUTE,
    TRANSFER,
    Finding,
    Route,
    RowEdge,
    Trace,
    TracedModel,
    TracedOrder,
    bytes_by_edge,
    routes_of,
    row_edges,
)
from spmdflow.plan.replay import Replay
from spmdflow.plan.reshard import check_weights
from spmdflow.plan.trace import TraceSettings, trace
from spmdflow.plan.update import check_batches
from spmdflow.plan.wait import check_order, check_waits
from spmdflow.plan.weight import WeightPlan, weight_plans
from spmdflow.plan.workload import kind_of, simulated
from spmdflow.transfer.register import method_spec


@dataclass(frozen=True)
class Proof:
    """One check, and over how much it went."""

    name: str
    what: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class PlanReport:
    """A plan of one step."""

    script: str
    world_size: int
    trace: Trace
    step: int
    """Number of the step that is shown."""
    orders: tuple[TracedOrder, ...]
    """Of that step."""
    edges: tuple[RowEdge, ...]
    routes: tuple[Route, ...]
    groups: tuple[PlannedGroup, ...]
    group_kinds: tuple[GroupKind, ...]
    weights: tuple[WeightPlan, ...]
    prediction: Prediction
    proofs: tuple[Proof, ...]
    missing_here: str | None
    """Why this machine would refuse the run, though the plan is fine."""
    seconds: float
    """That planning took."""

    @property
    def findings(self) -> list[Finding]:
        """Everything that is wrong."""
        return [finding for proof in self.proofs for finding in proof.findings]

    @cached_property
    def edge_bytes(self) -> dict[tuple[int, int], int]:
        """Row bytes of the step by (source, destination)."""
        return bytes_by_edge(self.edges)


def plan(
    script: ModuleType,
    cfg: Any,
    settings: TraceSettings,
    hardware: Hardware,
    *,
    replay: Replay | None = None,
) -> PlanReport:
    """Trace a script and prove, count and predict its last traced step. Refusal: see `trace`.

    Any: an object of the script's settings class.
    """
    started = time.perf_counter()
    with _without_collections():
        traced = trace(script, cfg, settings, replay)
        if (
            traced.links and settings.num_steps == 1 and replay is None
        ):  # the first step fills a pipeline
            traced = trace(script, cfg, _two_steps(settings), replay)
        report = _report(script, cfg, traced, hardware, started)
        if replay is not None:
            report = replace(report, proofs=(*report.proofs, _counted(traced, replay)))
    return report


def _counted(traced: Trace, replay: Replay) -> Proof:
    """Whether the ranks of the run counted the bytes that are planned."""
    found, edges = [], 0
    for step in replay.steps:
        planned, counted = traced.edges_by_step.get(step, {}), replay.edges(step)
        edges += len(counted)
        for source, rank in sorted({*planned, *counted}):
            sizes = planned.get((source, rank), 0), counted.get((source, rank), 0)
            if sizes[0] != sizes[1]:
                text = (
                    f"edge {source} -> {rank} in step {step}: got {sizes[1]} bytes counted, "
                    f"expected the {sizes[0]} that are planned; plan with the script and settings "
                    f"of the run"
                )
                found.append(Finding("bytes", text))
    what = f"{edges} edges of steps {', '.join(map(str, replay.steps))} as the run counted them"
    return Proof("bytes", what, tuple(found[:5]))


def _two_steps(settings: TraceSettings) -> TraceSettings:
    return replace(settings, num_steps=2)


def _report(
    script: ModuleType, cfg: Any, traced: Trace, hardware: Hardware, started: float
) -> PlanReport:
    step = traced.steps[-1] if traced.steps else 0
    orders = tuple(order for order in traced.orders if order.step == step)
    edges = list(row_edges(orders))
    weights = weight_plans(traced, _syncs(traced, orders))
    step_calls = simulated(traced, orders)
    prediction = predict(traced, orders, edges, step_calls, hardware, ways=weights)
    groups = groups_of(traced)
    proofs = _proofs(traced, cfg, edges, weights, prediction)
    return PlanReport(
        script=str(script.__file__),
        world_size=len(traced.world),
        trace=traced,
        step=step,
        orders=orders,
        edges=tuple(edges),
        routes=tuple(routes_of(traced, edges)),
        groups=tuple(groups),
        group_kinds=tuple(kinds_of(groups, dict(traced.models))),
        weights=tuple(weights),
        prediction=prediction,
        proofs=tuple(proofs),
        missing_here=missing_here(cfg, len(traced.world)),
        seconds=time.perf_counter() - started,
    )


def _proofs(
    traced: Trace,
    cfg: Any,
    edges: list[RowEdge],
    weights: list[WeightPlan],
    prediction: Prediction,
) -> Iterator[Proof]:
    calls = sum(order.lane == COMPUTE for order in traced.orders)
    transfers = sum(order.lane == TRANSFER for order in traced.orders)
    phases = len(prediction.memory)
    yield Proof("settings", "the settings' own checks", tuple(setting_findings(cfg, traced)))
    yield Proof("rows", f"{len(edges)} edges bring each row once", tuple(check_rows(traced)))
    yield Proof(
        "members", f"all members enter {calls} calls and their groups", tuple(check_members(traced))
    )
    yield Proof(
        "order", f"one order of commands on {len(traced.world)} ranks", tuple(check_order(traced))
    )
    yield Proof(
        "waits",
        f"no circle among {calls} calls and {transfers} transfers",
        tuple(check_waits(traced)),
    )
    yield Proof("batches", "updates use each row once an epoch", tuple(check_batches(traced)))
    yield from _weights_proved(weights)
    if phases:
        yield Proof("memory", f"{phases} phases fit ({prediction.hardware})", prediction.findings)


def _weights_proved(weights: list[WeightPlan]) -> Iterator[Proof]:
    """Copies that are planned box by box; of other ways whole shards go to fixed groups."""
    ways = [(way, way.copies) for way in weights if way.copies is not None]
    if ways:
        names = {way.target: f"weights of {way.source} to {way.target}" for way, _ in ways}
        found = [check_weights(copies, way=names[way.target]) for way, copies in ways]
        ranks = sum(len(copies.need) for _, copies in ways)
        what = f"{ranks} ranks get each element that they lack once"
        yield Proof("weights", what, tuple(finding for faults in found for finding in faults))


def _syncs(traced: Trace, orders: tuple[TracedOrder, ...]) -> dict[str, int]:
    """How often weights pass to each model that generates, in a step that follows an update."""
    found: dict[str, int] = {}
    for order in orders:
        name, _, method = order.label.partition(".")
        if order.operation != "call" or name not in traced.models:
            continue
        if method == "receive_weights":
            found[name] = found.get(name, 0) + 1
        elif kind_of(method_spec(traced.models[name].worker_class, method)) == "generate":
            linked = any(generator == name for _, generator in traced.links)
            found.setdefault(name, 0 if linked else 1)
    return found


@contextmanager
def _without_collections() -> Iterator[None]:
    """A plan of a thousand ranks makes millions of objects, none of them in circles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_AXES = ("replica", "tp", "pp", "dp", "embedding", "gen_replica", "gen_tp", "gen_pp", "micro_dp")


@dataclass(frozen=True)
class PlannedGroup:
    """One group; models on the same ranks share it."""

    spec: GroupSpec
    """Its key: ranks, lane and backend."""
    made_by: str
    """The model that asked for it first; run: the transfer lane's."""


@dataclass(frozen=True)
class GroupKind:
    """Groups of one model that are alike."""

    made_by: str
    axis: str
    """Such as tp, or pool, single; several names where axes have the same groups."""
    lane: str
    backend: str
    size: int
    """Ranks of each, at most."""
    members: tuple[tuple[int, ...], ...]
    """The ranks of every one, in the order in which they are made."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.members)


def groups_of(trace: Trace) -> list[PlannedGroup]:
    """Every group, in the order in which the ranks make them; the first is the transfer lane's."""
    lane = GroupSpec(trace.world, "transfer", "gloo")
    found = {lane: PlannedGroup(lane, "run")}
    for order in trace.orders:
        if order.operation != "groups":
            continue
        maker = order.label.removesuffix(".groups")
        for ranks, name, backend in next(iter(order.commands.values()))["specs"]:
            spec = GroupSpec(tuple(ranks), name, backend)
            found.setdefault(spec, PlannedGroup(spec, maker))
    return list(found.values())


def kinds_of(groups: Iterable[PlannedGroup], models: dict[str, TracedModel]) -> list[GroupKind]:
    """The groups by model, axis, backend and size, in their order."""
    axes = {name: _axes_of(model.layout) for name, model in models.items()}
    members: dict[tuple[str, str, str, str], list[tuple[int, ...]]] = {}
    for group in groups:
        spec = group.spec
        axis = axes.get(group.made_by, {}).get(spec.ranks)
        axis = axis or ("all ranks" if group.made_by == "run" else "both pools")
        key = (group.made_by, axis, spec.lane, spec.backend)
        members.setdefault(key, []).append(spec.ranks)
    return [
        GroupKind(*key, size=max(map(len, ranks)), members=tuple(ranks))
        for key, ranks in members.items()
    ]


def _axes_of(layout: Layout) -> dict[tuple[int, ...], str]:
    """Names of every group of a layout; those of one axis or more."""
    names: dict[tuple[int, ...], list[str]] = {(rank,): ["single"] for rank in layout.ranks}
    for axis in _AXES:
        for ranks in layout.axis_groups(axis):
            if len(ranks) > 1:
                names.setdefault(ranks, []).append(axis)
    if len(layout.ranks) > 1:
        names[layout.ranks] = ["pool"]
    return {ranks: ", ".join(axes) for ranks, axes in names.items()}


def setting_findings(cfg: Any, trace: Trace) -> list[Finding]:
    """Faults that a run would refuse before it starts. Any: the script's settings."""
    found = faults(cfg, len(trace.world), here=False)
    return [Finding("settings", str(fault)) for fault in found]


def missing_here(cfg: Any, world_size: int) -> str | None:
    """Why a run would be refused on this machine, though the plan is fine; None if it would not."""
    planned = {str(fault) for fault in faults(cfg, world_size, here=False)}
    return next((str(f) for f in faults(cfg, world_size) if str(f) not in planned), None)
