"""`PlanReport`: everything that a plan shows, derived from the record of a dry run."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from types import ModuleType
from typing import Any

from spmdflow.config.check import problems as problems_of
from spmdflow.config.resolve import Choice
from spmdflow.hybrid_engine.reshard import Copies
from spmdflow.log import PLANNING
from spmdflow.mapping.hardware import Hardware
from spmdflow.parallel.group import GroupSpec
from spmdflow.parallel.layout import Layout
from spmdflow.plan.check import check_group_members, check_weight_copies, check_weight_shards
from spmdflow.plan.prediction import Prediction, predict
from spmdflow.plan.record import (
    BytesByEdge,
    Problem,
    Route,
    Trace,
    TracedEdge,
    bytes_by_edge,
    routes_of,
    row_edges,
)
from spmdflow.plan.replay import Replay
from spmdflow.plan.trace import TraceSettings, trace
from spmdflow.plan.varied import VariedPrediction, predict_varied
from spmdflow.plan.weight import WeightPlan, weight_plans
from spmdflow.runtime.call import Call
from spmdflow.runtime.executor import COMPUTE, TRANSFER

planning = logging.getLogger(PLANNING)

_AXES = ("replica", "tp", "pp", "dp", "embedding", "gen_replica", "gen_tp", "gen_pp", "micro_dp")
_EXPERT_AXES = ("ep", "expert_dp", "tp_ep", "copy")
"""Axes that are the same as others unless experts are divided."""
_MOST_BYTE_PROBLEMS = 5
_CALL_FACTS = ("number", "label", "line", "phase", "ranks")
_SIZES = tuple(each.name for each in fields(Layout) if each.name != "ranks")

GroupKind = tuple[str, str, str, str]
"""What groups of one kind share: owner (a model; `run` owns the transfer lane's), axis (such as tp,
pool or single; several names if axes have the same groups), lane and backend."""


@dataclass(frozen=True)
class CheckResult:
    """What one check covered, and the problems that it reports."""

    name: str
    covered: str
    problems: Sequence[Problem]


@dataclass(frozen=True)
class PlanReport:
    """A plan of one step."""

    script: str
    trace: Trace
    step: int
    """Number of the step that is shown."""
    step_calls: tuple[Call, ...]
    """Of that step."""
    edges: tuple[TracedEdge, ...]
    weights: tuple[WeightPlan, ...]
    prediction: Prediction
    """Of rows of one length."""
    varied: VariedPrediction | None
    """The same step with rows of different lengths; None if it is not wanted or not known."""
    checks: tuple[CheckResult, ...]
    missing_here: str | None
    """Why the run could not start on this node although the plan is fine; None if it could."""
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
        """The problems of all checks."""
        problems: list[Problem] = []
        for check in self.checks:
            problems.extend(check.problems)
        return problems

    @cached_property
    def edge_bytes(self) -> dict[tuple[int, int], int]:
        """Row bytes of the step by (source, destination)."""
        return bytes_by_edge(self.edges)

    @cached_property
    def routes(self) -> list[Route]:
        """Row bytes of the step by the calls that write and read the rows."""
        return routes_of(self.trace, self.edges)

    @cached_property
    def groups(self) -> dict[GroupSpec, str]:
        """Every process group -> the model that asked for it first, in the order of creation.

        The first entry is the transfer lane's gloo group of all ranks, whose owner is "run".
        """
        owners = {GroupSpec(self.trace.world, "transfer", "gloo"): "run"}
        for call in self.trace.calls:
            if call.operation == "groups":
                for ranks, lane, backend in call.command["specs"]:
                    spec = GroupSpec(tuple(ranks), lane, backend)
                    owners.setdefault(spec, call.label.removesuffix(".groups"))
        return owners

    def group_kinds(self) -> dict[GroupKind, list[tuple[int, ...]]]:
        """Return the ranks of every group, by kind: (owner, axis, lane, backend).

        The axis is that of the owner's layout with the same ranks. Otherwise it is "all ranks" for
        the owner "run", and "both pools" for a group that a model shares with another one.
        """
        axes = {}
        for name, model in self.trace.models.items():
            axes[name] = _axes_of(model.layout)
        ranks_of: dict[GroupKind, list[tuple[int, ...]]] = {}
        for spec, owner in self.groups.items():
            axis = axes.get(owner, {}).get(spec.ranks)
            if axis is None:
                axis = "all ranks" if owner == "run" else "both pools"
            ranks_of.setdefault((owner, axis, spec.lane, spec.backend), []).append(spec.ranks)
        return ranks_of

    def calls(self) -> Iterator[dict[str, Any]]:
        """Yield the facts of every call of the step as data for JSON, in the order of the script.

        rows, prompt_tokens and response_tokens are None for a call without rows.
        """
        for timed in self.prediction.calls:
            call = timed.call
            tokens = self.trace.tokens.get(call.key)
            facts = {}
            for name in _CALL_FACTS:
                facts[name] = getattr(call, name)
            facts["line"] = call.line_number
            yield facts | {
                "rows": tokens.num_rows if tokens else None,
                "prompt_tokens": tokens.prompts if tokens else None,
                "response_tokens": tokens.responses if tokens else None,
                "start_seconds": timed.start,
                "seconds": timed.seconds,
                "limit": timed.limit,
            }

    def to_plain(self) -> dict[str, Any]:
        """The plan as data for --json: the facts of the text, and everything else but row ids."""
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
            "checks": {check.name: not check.problems for check in self.checks},
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
            "groups": [asdict(spec) | {"made_by": owner} for spec, owner in self.groups.items()],
            "calls": list(self.calls()),
            "edges": self._plain_edges(self.edge_bytes),
            "routes": [asdict(route) for route in self.routes],
            "weights": [
                {name: value for name, value in vars(sync).items() if name != "parts"}
                | {"received": dict(sync.received), "edges": self._plain_edges(sync.edges)}
                for sync in self.weights
            ],
            "order": self._plain_order(),
            "memory": [asdict(phase) | {"total": phase.total} for phase in prediction.memory],
            "seconds": {
                "step": prediction.seconds,
                "tokens_per_second": prediction.tokens_per_second,
                "stages": prediction.stage_seconds(),
                "varied": self._plain_varied(),
            },
            "assumed": list(trace.assumptions),
            "missing_here": self.missing_here,
            "reads": [asdict(read) for read in trace.reads],
            "not_predicted": dict(prediction.without),
            "chosen": [asdict(choice) for choice in self.choices],
            "planning_seconds": self.seconds,
        }

    def _plain_varied(self) -> dict[str, Any] | None:
        """Return the seconds of the step with rows of different lengths, or None."""
        if self.varied is None:
            return None
        return {
            "lengths": self.varied.lengths,
            "step": self.varied.prediction.seconds,
            "tokens_per_second": self.varied.prediction.tokens_per_second,
            "stages": self.varied.prediction.stage_seconds(),
        }

    def _plain_edges(self, edges: BytesByEdge) -> list[list[Any]]:
        """Return [source, destination, bytes, whether nodes differ] of each edge, sorted."""
        node = self.trace.node_of
        result = []
        for (a, b), size in sorted(edges.items()):
            result.append([a, b, size, node[a] != node[b]])
        return result

    def lanes(self) -> dict[int, dict[str, list[Call]]]:
        """Return the calls of each rank by lane (compute, transfer), in the order of the script.

        Ranks ascend. A rank without calls is missing.
        """
        lanes_of: dict[int, dict[str, list[Call]]] = {}
        for call in self.step_calls:
            for rank in call.commands:
                lanes = lanes_of.setdefault(rank, {COMPUTE: [], TRANSFER: []})
                lanes[call.lane].append(call)
        return dict(sorted(lanes_of.items()))

    def _plain_order(self) -> list[dict[str, Any]]:
        """Return the numbers of the calls of each lane, as {"ranks": [...], "compute": [...], ...}.

        Ranks with the same numbers share one entry.
        """
        alike: dict[str, dict[str, Any]] = {}
        for rank, lanes in self.lanes().items():
            numbers = {}
            for lane, step_calls in lanes.items():
                numbers[lane] = [call.number for call in step_calls]
            alike.setdefault(str(numbers), {"ranks": [], **numbers})["ranks"].append(rank)
        return list(alike.values())


def _axes_of(layout: Layout) -> dict[tuple[int, ...], str]:
    """Return the axes of a layout by the ranks of their groups, such as (0, 1) -> "tp, gen_tp".

    Groups of one rank are "single". The group of all ranks is "pool", whatever axes it has.
    """
    names: dict[tuple[int, ...], list[str]] = {(rank,): ["single"] for rank in layout.ranks}
    for axis in (*_AXES, *(_EXPERT_AXES if layout.expert_size > 1 else ())):
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
    variation: float = 0.0,
) -> PlanReport:
    """Trace a script, then check its last traced step, count its bytes and predict its seconds.

    A script whose generator has ranks of its own is traced for at least two steps, as the first one
    fills its pipeline. Problems are part of the report; the PlanError of `trace` is raised.
    Python's garbage collector is off meanwhile.
    Any: an object of the script's settings class.
    choices: what `auto` was resolved to in it.
    replay: the run to compare bytes with.
    variation: coefficient of variation of the lengths of responses, for `PlanReport.varied`; 0: do
    not predict a step with rows of different lengths.
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
        step_calls = tuple(call for call in traced.calls if call.step == step)
        edges = tuple(row_edges(step_calls))
        weights = tuple(weight_plans(traced))
        prediction = predict(traced, step_calls, hardware, weights=weights)
        varied = None
        if variation and prediction.seconds:
            again = replace(settings, num_steps=len(traced.steps))
            varied = predict_varied(
                script, cfg, again, hardware, traced, weights=weights, variation=variation
            )
        checks = [
            _check_settings(cfg, len(traced.world)),
            _check_members(traced),
        ]
        if weights:
            checks.append(_check_weights(weights))
        if prediction.memory:
            covered = f"{len(prediction.memory)} phases fit ({prediction.hardware})"
            checks.append(CheckResult("memory", covered, prediction.problems))
        if replay is not None:
            checks.append(_check_bytes(traced, replay))
    finally:
        if is_collecting:
            gc.enable()
    return PlanReport(
        script=str(script.__file__),
        trace=traced,
        step=step,
        step_calls=step_calls,
        edges=edges,
        weights=weights,
        prediction=prediction,
        varied=varied,
        checks=tuple(checks),
        missing_here=_missing_here(cfg, len(traced.world)),
        choices=(*choices, *traced.choices),
        seconds=time.perf_counter() - started,
    )


def _check_settings(cfg: Any, world_size: int) -> CheckResult:
    """Check the settings for errors that every node would have. Any: the script's settings."""
    problems = []
    for problem in problems_of(cfg, world_size, here=False):
        problems.append(Problem("settings", str(problem)))
    return CheckResult("settings", "the settings' own checks", problems)


def _missing_here(cfg: Any, world_size: int) -> str | None:
    """Return the first error in the settings that only this node has, or None.

    Such an error is, for example, a missing file.
    """
    everywhere = {str(problem) for problem in problems_of(cfg, world_size, here=False)}
    for problem in problems_of(cfg, world_size):
        if str(problem) not in everywhere:
            return str(problem)
    return None


def _check_members(traced: Trace) -> CheckResult:
    """Check that all ranks that a call or a process group needs take part in it."""
    calls = sum(call.lane == COMPUTE for call in traced.calls)
    planning.debug("checking the members of %d calls", calls)
    covered = f"all members enter {calls} calls and their groups"
    return CheckResult("members", covered, check_group_members(traced))


def _check_weights(weights: Sequence[WeightPlan]) -> CheckResult:
    """Check that each rank gets every element of the weights that it lacks, once.

    Weights that could not be planned are a problem, too, as nothing was checked. Those whose tables
    the start finds and checks are only named.
    """
    problems: list[Problem] = []
    num_ranks = 0
    num_edges = 0
    derived = ""
    for sync in weights:
        label = f"weights of {sync.source} to {sync.target}"
        num_ranks += len(sync.received)
        num_edges += len(sync.edges)
        planning.debug("checking the %s", label)
        if isinstance(sync.parts, Copies):
            problems += check_weight_copies(sync.parts, label=label)
        elif sync.parts is not None:
            problems += check_weight_shards(sync.parts, label=label)
        elif sync.is_derived:
            derived += f"; the start checks the {label}"
        else:
            problems.append(Problem("weights", f"{label}: {sync.note}; nothing was checked"))
    covered = f"{num_ranks} ranks get each element that they lack once, over {num_edges} edges"
    return CheckResult("weights", covered + derived, problems)


def _check_bytes(traced: Trace, replay: Replay) -> CheckResult:
    """Check that the run counted as many row bytes as planned, on every edge of every step.

    Reports at most five edges that differ.
    """
    problems = []
    num_edges = 0
    for step in replay.steps:
        planned = traced.edges_by_step.get(step, {})
        counted = replay.edges(step)
        num_edges += len(counted)
        for edge in sorted({*planned, *counted}):
            got = counted.get(edge, 0)
            expected = planned.get(edge, 0)
            if got != expected:
                text = (
                    f"edge {edge[0]} -> {edge[1]} in step {step}: got {got} bytes counted, "
                    f"expected the planned {expected}; plan with the script and settings of the run"
                )
                problems.append(Problem("bytes", text))
    steps = ", ".join(map(str, replay.steps))
    covered = f"{num_edges} edges of steps {steps} as the run counted them"
    return CheckResult("bytes", covered, problems[:_MOST_BYTE_PROBLEMS])
