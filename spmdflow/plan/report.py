"""`PlanReport`: everything that a plan shows, put together from the record of a dry run."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cached_property
from types import ModuleType
from typing import Any

from spmdflow.config.auto import Choice
from spmdflow.config.check import problems as problems_of
from spmdflow.hybrid_engine.reshard import Copies
from spmdflow.log import PLANNING
from spmdflow.mapping.hardware import Hardware
from spmdflow.parallel.group import GroupSpec
from spmdflow.parallel.layout import Layout
from spmdflow.plan.check import check_batches, check_members, check_shards, check_weights
from spmdflow.plan.prediction import Prediction, predict
from spmdflow.plan.record import (
    COMPUTE,
    TRANSFER,
    BytesByEdge,
    Problem,
    Route,
    Trace,
    TracedEdge,
    TracedOrder,
    bytes_by_edge,
    routes_of,
    row_edges,
)
from spmdflow.plan.replay import Replay
from spmdflow.plan.rows import check_rows
from spmdflow.plan.trace import TraceSettings, trace
from spmdflow.plan.weight import WeightPlan, weight_plans

planning = logging.getLogger(PLANNING)

_AXES = ("replica", "tp", "pp", "dp", "embedding", "gen_replica", "gen_tp", "gen_pp", "micro_dp")
_ORDER_FACTS = ("number", "label", "line", "phase", "ranks")
_SIZES = tuple(each.name for each in fields(Layout) if each.name != "ranks")

GroupKind = tuple[str, str, str, str]
"""Who made groups that are alike (a model, or run: the transfer lane's), their axis (such as tp, or
pool, single; several names where axes have the same groups), lane and backend."""


@dataclass(frozen=True)
class Proof:
    """One check: what it covered and what it found."""

    name: str
    what: str
    problems: Sequence[Problem]


@dataclass(frozen=True)
class PlanReport:
    """A plan of one step."""

    script: str
    trace: Trace
    step: int
    """Number of the step that is shown."""
    orders: tuple[TracedOrder, ...]
    """Of that step."""
    edges: tuple[TracedEdge, ...]
    weights: tuple[WeightPlan, ...]
    prediction: Prediction
    proofs: tuple[Proof, ...]
    missing_here: str | None
    """Why the run would not start on this node, though the plan is fine."""
    choices: tuple[Choice, ...]
    """What `auto` means in the settings."""
    seconds: float
    """Wall time of planning."""

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return len(self.trace.world)

    @property
    def problems(self) -> list[Problem]:
        """Everything that is wrong."""
        result = []
        for proof in self.proofs:
            for problem in proof.problems:
                result.append(problem)
        return result

    @cached_property
    def edge_bytes(self) -> dict[tuple[int, int], int]:
        """Row bytes of the step by (source, destination)."""
        return bytes_by_edge(self.edges)

    @cached_property
    def routes(self) -> list[Route]:
        """The same by the calls that made the rows and that read them."""
        return routes_of(self.trace, self.edges)

    @cached_property
    def groups(self) -> dict[GroupSpec, str]:
        """Every process group and who asked for it first, in the order in which ranks make them."""
        found = {GroupSpec(self.trace.world, "transfer", "gloo"): "run"}
        for order in self.trace.orders:
            if order.operation == "groups":
                for ranks, lane, backend in order.command["specs"]:
                    spec = GroupSpec(tuple(ranks), lane, backend)
                    found.setdefault(spec, order.label.removesuffix(".groups"))
        return found

    def group_kinds(self) -> dict[GroupKind, list[tuple[int, ...]]]:
        """The ranks of every group, by kind."""
        axes = {}
        for name, model in self.trace.models.items():
            axes[name] = _axes_of(model.layout)
        found: dict[GroupKind, list[tuple[int, ...]]] = {}
        for spec, maker in self.groups.items():
            axis = axes.get(maker, {}).get(spec.ranks)
            axis = axis or ("all ranks" if maker == "run" else "both pools")
            found.setdefault((maker, axis, spec.lane, spec.backend), []).append(spec.ranks)
        return found

    def calls(self) -> Iterator[dict[str, Any]]:
        """What is known of every call of the step, in the order of the script."""
        for call in self.prediction.calls:
            order = call.order
            tokens = self.trace.tokens.get(call.order.place)
            facts = {}
            for name in _ORDER_FACTS:
                facts[name] = getattr(order, name)
            counts = astuple(tokens) if tokens else (None, None, None)
            facts |= zip(("rows", "prompt_tokens", "response_tokens"), counts, strict=True)
            yield facts | {
                "start_seconds": call.start,
                "seconds": call.seconds,
                "limit": call.limit,
            }

    def to_plain(self) -> dict[str, Any]:
        """For --json: the same facts as the text, nothing left out but row ids."""
        trace = self.trace
        prediction = self.prediction
        return {
            "script": self.script,
            "world_size": self.world_size,
            "nodes": len(set(trace.nodes)),
            "hardware": prediction.hardware,
            "step": self.step,
            "ok": not self.problems,
            "findings": [asdict(problem) for problem in self.problems],
            "checks": {proof.name: not proof.problems for proof in self.proofs},
            "pools": {
                name: {"ranks": pool.ranks, "roles": pool.roles}
                for name, pool in trace.pools.items()
            },
            "models": [
                {
                    "name": model.name,
                    "class": model.worker_class.__name__,
                    "pool": model.pool,
                    "layout": {size: getattr(model.layout, size) for size in _SIZES},
                    "ranks": model.layout.ranks,
                }
                for model in trace.models.values()
            ],
            "groups": [asdict(spec) | {"made_by": maker} for spec, maker in self.groups.items()],
            "calls": list(self.calls()),
            "edges": self._plain_edges(self.edge_bytes),
            "routes": [asdict(route) for route in self.routes],
            "weights": [
                {name: value for name, value in vars(way).items() if name != "parts"}
                | {"received": dict(way.received), "edges": self._plain_edges(way.edges)}
                for way in self.weights
            ],
            "order": self._plain_order(),
            "memory": [asdict(phase) | {"total": phase.total} for phase in prediction.memory],
            "seconds": {
                "step": prediction.seconds,
                "tokens_per_second": prediction.tokens_per_second,
                "stages": prediction.stage_seconds(),
            },
            "assumed": list(trace.assumptions),
            "missing_here": self.missing_here,
            "reads": [asdict(read) for read in trace.reads],
            "not_predicted": dict(prediction.without),
            "chosen": [asdict(choice) for choice in self.choices],
            "planning_seconds": self.seconds,
        }

    def _plain_edges(self, edges: BytesByEdge) -> list[list[Any]]:
        """Source, destination, bytes, whether they cross nodes."""
        node = self.trace.node_of
        result = []
        for (a, b), size in sorted(edges.items()):
            result.append([a, b, size, node[a] != node[b]])
        return result

    def lanes(self) -> dict[int, dict[str, list[TracedOrder]]]:
        """The orders of each rank, by lane."""
        found: dict[int, dict[str, list[TracedOrder]]] = {}
        for order in self.orders:
            for rank in order.commands:
                lanes = found.setdefault(rank, {COMPUTE: [], TRANSFER: []})
                lanes[order.lane].append(order)
        return dict(sorted(found.items()))

    def _plain_order(self) -> list[dict[str, Any]]:
        """Numbers of calls and releases; ranks with the same ones together."""
        alike: dict[str, dict[str, Any]] = {}
        for rank, lanes in self.lanes().items():
            numbers = {}
            for lane, orders in lanes.items():
                numbers[lane] = [order.number for order in orders]
            alike.setdefault(str(numbers), {"ranks": [], **numbers})["ranks"].append(rank)
        return list(alike.values())


def _axes_of(layout: Layout) -> dict[tuple[int, ...], str]:
    """By group of a layout: the names of its axes, joined with commas."""
    names: dict[tuple[int, ...], list[str]] = {(rank,): ["single"] for rank in layout.ranks}
    for axis in _AXES:
        for ranks in layout.axis_groups(axis):
            if len(ranks) > 1:
                names.setdefault(ranks, []).append(axis)
    if len(layout.ranks) > 1:
        names[layout.ranks] = ["pool"]
    result = {}
    for ranks, axes in names.items():
        result[ranks] = ", ".join(axes)
    return result


def plan(
    script: ModuleType,
    cfg: Any,
    settings: TraceSettings,
    hardware: Hardware,
    *,
    replay: Replay | None = None,
    choices: Sequence[Choice] = (),
) -> PlanReport:
    """Trace a script and prove, count and predict its last traced step. PlanError: see `trace`.

    Any: an object of the script's settings class. choices: what `auto` was resolved to in it.
    """
    started = time.perf_counter()
    is_collecting = gc.isenabled()
    gc.disable()  # a plan of a thousand ranks makes millions of objects, no reference cycles
    try:
        traced = trace(script, cfg, settings, replay)
        if traced.links and settings.num_steps == 1 and replay is None:
            # the first step fills a pipeline
            traced = trace(script, cfg, replace(settings, num_steps=2), replay)
        step = traced.steps[-1] if traced.steps else 0
        orders = tuple(order for order in traced.orders if order.step == step)
        edges = tuple(row_edges(orders))
        weights = tuple(weight_plans(traced))
        prediction = predict(traced, orders, hardware, ways=weights)
        world_size = len(traced.world)
        wrong = []
        for problem in problems_of(cfg, world_size, here=False):
            wrong.append(str(problem))
        found = map(str, problems_of(cfg, world_size))
        here = next((text for text in found if text not in wrong), None)
        settings_found = []
        for text in wrong:
            settings_found.append(Problem("settings", text))
        proofs = [Proof("settings", "the settings' own checks", settings_found)]
        proofs += _proofs(traced, edges, weights, prediction)
        if replay is not None:
            proofs.append(_prove_bytes(traced, replay))
    finally:
        if is_collecting:
            gc.enable()
    chosen = (*choices, *traced.choices)
    facts = traced, step, orders, edges, weights, prediction, tuple(proofs), here, chosen
    return PlanReport(str(script.__file__), *facts, seconds=time.perf_counter() - started)


def _proofs(
    traced: Trace,
    edges: Sequence[TracedEdge],
    weights: Sequence[WeightPlan],
    prediction: Prediction,
) -> Iterator[Proof]:
    calls = sum(order.lane == COMPUTE for order in traced.orders)
    planning.debug("proving %d edges of rows, %d calls", len(edges), calls)
    yield Proof("rows", f"{len(edges)} edges bring each row once", check_rows(traced))
    what = f"all members enter {calls} calls and their groups"
    yield Proof("members", what, check_members(traced))
    yield Proof("batches", "updates use each row once an epoch", check_batches(traced))
    if weights:
        found: list[Problem] = []
        for way in weights:
            name = f"weights of {way.source} to {way.target}"
            planning.debug("proving the %s", name)
            if isinstance(way.parts, Copies):
                found += check_weights(way.parts, way=name)
            elif way.parts is not None:
                found += check_shards(way.parts, way=name)
            else:
                found.append(Problem("weights", f"{name}: {way.note}; nothing is proved"))
        ranks, ways = (sum(len(getattr(w, of)) for w in weights) for of in ("received", "edges"))
        what = f"{ranks} ranks get each element that they lack once, over {ways} edges"
        yield Proof("weights", what, found)
    phases = len(prediction.memory)
    if phases:
        yield Proof("memory", f"{phases} phases fit ({prediction.hardware})", prediction.problems)


def _prove_bytes(traced: Trace, replay: Replay) -> Proof:
    """Whether the ranks of the run counted the bytes that are planned."""
    found = []
    num_edges = 0
    for step in replay.steps:
        planned = traced.edges_by_step.get(step, {})
        counted = replay.edges(step)
        num_edges += len(counted)
        for edge in sorted({*planned, *counted}):
            sizes = planned.get(edge, 0), counted.get(edge, 0)
            if sizes[0] != sizes[1]:
                text = (
                    f"edge {edge[0]} -> {edge[1]} in step {step}: got {sizes[1]} bytes "
                    f"counted, expected the {sizes[0]} that are planned; plan with the "
                    f"script and settings of the run"
                )
                found.append(Problem("bytes", text))
    what = f"{num_edges} edges of steps {', '.join(map(str, replay.steps))} as the run counted them"
    return Proof("bytes", what, found[:5])
