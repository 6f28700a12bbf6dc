"""Seconds and memory of a traced step, by the simulators of `mapping` on the trace's own order.

A call starts when all its ranks have finished earlier calls and its rows have arrived; so pools
overlap as in the trace, not by a table of stages. On CPUs, calls that run at once
share the cores: every rank of a running task asks for a core for the part of the time that it
works, and where the ranks of a node ask for more cores than it has, they share them evenly; a task
on several nodes goes at the speed of the slowest. A device of its own for every rank is
`cores=inf`. Times are predictions from one stated file of coefficients; nothing is fitted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from spmdflow.errors import ConfigError
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.memory import pool_memory, state_bytes
from spmdflow.mapping.placed import CallSeconds, call_seconds
from spmdflow.mapping.seconds import add_parts, transition_seconds
from spmdflow.plan.record import COMPUTE, Problem, Trace, TracedOrder, row_edges
from spmdflow.plan.weight import WeightPlan
from spmdflow.plan.workload import Simulated, simulate_orders


@dataclass(frozen=True)
class CallTime:
    """When a call runs."""

    order: TracedOrder
    start: float
    end: float
    limit: str = ""
    """Its largest part: compute, memory, kv_read, tensor_parallel, ...; empty: not simulated."""
    notes: tuple[str, ...] = ()
    kind: str = ""
    """generate, infer or train; empty: not simulated."""

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of a rank of one pool while one call runs, by what holds them."""

    pool: str
    phase: str
    parts: Mapping[str, float]
    budget: float
    """Bytes that a plan may fill."""
    on_host: Mapping[str, float] = field(default_factory=dict)
    """Bytes of parts that are offloaded to host memory during the call."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and memory of a step."""

    hardware: str
    calls: tuple[CallTime, ...] = ()
    memory: tuple[PhaseMemory, ...] = ()
    seconds: float = 0.0
    """Of the step: until its last call ends."""
    tokens: float = 0.0
    """Prompt and response tokens of the step's generations, or of its updates if none."""
    problems: tuple[Problem, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    """Models that no simulator knows, and why."""

    @property
    def tokens_per_second(self) -> float:
        """0 if nothing takes time."""
        if self.seconds:
            return self.tokens / self.seconds
        return 0.0

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by method, as a run's time/<method>_seconds: calls of one method add."""
        found: dict[str, float] = {}
        for call in self.calls:
            method = call.order.method
            if method and call.order.phase == "train":
                found[method] = found.get(method, 0.0) + call.seconds
        return found


def predict(
    trace: Trace,
    orders: Sequence[TracedOrder],
    hardware: Hardware,
    *,
    ways: Sequence[WeightPlan] = (),
) -> Prediction:
    """Seconds of every call of a step, and memory by pool and phase.

    ways: `weight_plans` of the trace; a model without one, or whose bytes by edge are unknown, gets
    the seconds of the paper's formula (Table 2).
    """
    step = simulate_orders(trace, orders)
    memory = _memory(trace, step, hardware)
    problems = []
    for phase in memory.values():
        if phase.total > hardware.usable_bytes * 1.0001:
            problems.append(_too_much(phase, step, hardware))
    planned = {}
    for way in ways:
        if way.inter_bytes >= 0:
            planned[way.target] = way
    estimates = _estimates(step, hardware, memory, planned, problems)
    calls = _schedule(orders, step, estimates, hardware)
    generated = []
    for place, call in step.calls.items():
        if call.kind == "generate":
            generated.append(place)
    counted = generated or [place for place, call in step.calls.items() if call.kind == "train"]
    tokens = [trace.tokens[place] for place in counted]
    return Prediction(
        hardware=hardware.name,
        calls=tuple(calls),
        memory=tuple(memory.values()),
        seconds=max((call.end for call in calls), default=0.0),
        tokens=sum(t.num_rows * (t.prompts + t.responses) for t in tokens),
        problems=tuple(problems),
        without=step.without,
    )


def _memory(trace: Trace, step: Simulated, hardware: Hardware) -> dict[str, PhaseMemory]:
    """By call title; residents of all models of a pool add."""
    found: dict[str, PhaseMemory] = {}
    for pool in dict.fromkeys(model.pool for model in trace.models.values()):
        names = []
        for name in step.strategies:
            if trace.models[name].pool == pool:
                names.append(name)
        if step.dataflow is None or not names:
            continue
        members = []
        for name in names:
            members.append((step.dataflow.model(name), step.strategies[name]))
        state = reduce(add_parts, (state_bytes(model, cut) for model, cut in members))
        for title, parts in pool_memory(members, step.dataflow, hardware).items():
            if "kv_cache" in parts:
                parts = {**parts, "kv_cache": max(parts["kv_cache"], 0.0)}
            away = {}
            for part in ("parameters", "optimizer"):
                away[part] = state[part] - parts.get(part, 0.0)
            away = {part: float(size) for part, size in away.items() if size > 0}
            found[title] = PhaseMemory(pool, title, dict(parts), hardware.usable_bytes, away)
    return found


def _too_much(phase: PhaseMemory, step: Simulated, hardware: Hardware) -> Problem:
    largest = max(phase.parts, key=lambda name: phase.parts[name])
    role = phase.phase.partition(".")[0]
    cache = phase.parts.get("kv_cache", 0.0)
    if cache and phase.total - cache <= hardware.usable_bytes:
        largest = "kv_cache"  # all else fits
    if step.dataflow is not None:
        rollout = step.dataflow.model(role).rollout
    else:
        rollout = None
    is_fixed = rollout is not None and rollout.facts.fixed_cache
    knob = {
        "activations": f"set {role}.engine.options=[recompute] or a smaller "
        f"{role}.engine.micro_batch",
        "logits": f"set a smaller {role}.engine.micro_batch",
        "kv_cache": f"lower {role}.rollout.{'kv_cache' if is_fixed else 'max_batch_size'}",
        "optimizer": f"raise p or t of {role}.engine.layout, or {role}.engine.residency=optimizer",
    }.get(largest, f"raise t or p of {role}.engine.layout, use more ranks, or another placement")
    return Problem(
        "memory",
        f"pool {phase.pool}, {phase.phase}: got {phase.total / 1e9:.1f} GB a rank "
        f"({phase.parts[largest] / 1e9:.1f} of it {largest}), expected at most "
        f"{hardware.usable_bytes / 1e9:.1f} of {hardware.memory_bytes / 1e9:.0f} GB "
        f"({hardware.name}); {knob}",
    )


def _estimates(
    step: Simulated,
    hardware: Hardware,
    memory: Mapping[str, PhaseMemory],
    ways: Mapping[str, WeightPlan],
    problems: list[Problem],
) -> dict[int, CallSeconds]:
    """By the order's place; a model's first generation includes the time that its weights take."""
    found: dict[int, CallSeconds] = {}
    moved: set[str] = set()
    for place, call in step.calls.items():
        assert step.dataflow is not None
        model = step.dataflow.model(call.model)
        strategy = step.strategies[call.model]
        generates = call.kind == "generate"
        cache = memory[call.title].parts.get("kv_cache", 0.0) if generates else 0.0
        try:
            estimate = call_seconds(call, model, strategy, hardware, kv_bytes=cache)
        except ConfigError as err:
            problems.append(Problem("memory", str(err)))
            estimate = call_seconds(call, model, strategy, hardware, kv_bytes=1e15)
        if generates and call.model not in moved:
            moved.add(call.model)
            if call.model in ways:
                estimate = estimate + planned_transition(ways[call.model], hardware)
            else:
                seconds = transition_seconds(model, strategy, hardware)
                estimate = estimate + CallSeconds({"transition": float(seconds)})
        found[place] = estimate
    return found


def planned_transition(way: WeightPlan, hardware: Hardware) -> CallSeconds:
    """Seconds in which the busiest rank has received its bytes, and the busiest node its own.

    The ranks of a node share its network; a broadcast passes it once. One hop for each rank that
    the rank with most of them receives from.
    """
    if not way.edges:
        return CallSeconds({"transition": 0.0})
    far = max(way.entering.values(), default=0)
    bytes_time = max(max(way.received.values()) / hardware.link_rate, far / hardware.network_rate)
    sources = Counter(rank for _, rank in way.edges)
    hop = hardware.network_hop_seconds if far else hardware.link_hop_seconds
    hops = max(sources.values()) * hop + hardware.collective_base_seconds
    return CallSeconds({"transition": bytes_time + hops})


def _schedule(
    orders: Sequence[TracedOrder],
    step: Simulated,
    estimates: Mapping[int, CallSeconds],
    hardware: Hardware,
) -> list[CallTime]:
    """Every order of the compute lane as early as its ranks and rows allow."""
    moved = _transfer_seconds(orders, hardware)
    calls = []
    for order in orders:
        if order.lane == COMPUTE:
            calls.append(order)
    last: dict[int, int] = {}
    tasks: list[Task] = []
    numbers: dict[int, int] = {}
    rows: list[tuple[int | None, float]] = []
    for order in orders:
        if order.lane != COMPUTE:
            rows.append((numbers.get(order.command["result"]), moved.get(order.place, 0.0)))
            continue
        estimate = estimates.get(order.place)
        before = set()
        for rank in order.commands:
            if rank in last:
                before.add((last[rank], 0.0))
        before |= {(place, wait) for place, wait in rows if place is not None}
        earliest = max((wait for place, wait in rows if place is None), default=0.0)
        seconds = hardware.call_seconds
        busy = 1.0
        if estimate:
            seconds = estimate.seconds
            if seconds:  # a rank works except in the pipeline's bubble
                busy -= estimate.parts.get("bubble", 0.0) / seconds
        tasks.append(Task(seconds, order.ranks, tuple(before), earliest, busy))
        numbers[order.number] = len(tasks) - 1
        last |= dict.fromkeys(order.commands, len(tasks) - 1)
        rows = []
    spans = timeline(tasks, node_size=hardware.gpus_per_node, cores=hardware.cores)
    found = []
    for order, span in zip(calls, spans, strict=True):
        known = estimates.get(order.place)
        kind = step.calls[order.place].kind if known else ""
        limit, notes = (known.limit, known.notes) if known else ("", ())
        found.append(CallTime(order, *span, limit, notes, kind))
    return found


def _transfer_seconds(orders: Sequence[TracedOrder], hardware: Hardware) -> dict[int, float]:
    """Seconds of each transfer: the busiest rank's bytes over its share of the network.

    Rows travel over gloo, between nodes and inside of them alike.
    """
    rate = hardware.network_rate / hardware.gpus_per_node
    busy: dict[int, Counter[int]] = {}
    for edge in row_edges(orders):
        ranks = busy.setdefault(edge.release, Counter())
        ranks[edge.source] += edge.num_bytes
        ranks[edge.destination] += edge.num_bytes
    base = hardware.collective_base_seconds
    return {place: base + max(ranks.values()) / rate for place, ranks in busy.items()}


@dataclass(frozen=True)
class Task:
    """Work that some ranks do together."""

    seconds: float
    """Duration if every rank has a CPU core."""
    ranks: tuple[int, ...]
    after: tuple[tuple[int, float], ...] = ()
    """(earlier task, seconds from its end until this one may begin)."""
    earliest: float = 0.0
    busy: float = 1.0
    """Part of its time that a rank works; in the rest, such as a pipeline's bubble, it waits."""


@dataclass
class _Running:
    asked: Mapping[int, float]
    """Node -> cores that the task's ranks on it ask for."""
    left: float
    """Seconds of work when the speed was last set."""
    since: float
    end: float
    speed: float = 1.0

    def go_at(self, speed: float, now: float) -> None:
        """From now on; an unchanged speed changes nothing, not even by rounding."""
        if speed != self.speed:
            self.left -= (now - self.since) * self.speed
            self.since = now
            self.speed = speed
            self.end = now + self.left / speed


def timeline(
    tasks: Sequence[Task], *, node_size: float = math.inf, cores: float = math.inf
) -> list[tuple[float, float]]:
    """Start and end of every task, in their order, each as early as it may.

    node_size: ranks of a node, in rank order; cores: CPU cores of a node.
    """
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    running: dict[int, _Running] = {}
    now = 0.0
    while len(ends) < len(tasks):
        begin = {  # inf: an earlier task has not ended
            place: max([task.earliest, *(ends.get(at, math.inf) + wait for at, wait in task.after)])
            for place, task in enumerate(tasks)
            if place not in starts
        }
        for place, time in begin.items():
            if time <= now:
                task = tasks[place]
                starts[place] = time
                nodes = Counter(int(rank // node_size) for rank in task.ranks)
                asked = {}
                for node, count in nodes.items():
                    asked[node] = count * task.busy
                running[place] = _Running(asked, task.seconds, now, now + task.seconds)
        _share(running.values(), now, cores)
        later = []
        for time in begin.values():
            if time > now:
                later.append(time)
        now = min([task.end for task in running.values()] + later)
        for place in [place for place, task in running.items() if task.end <= now]:
            ends[place] = running.pop(place).end
    result = []
    for place in range(len(tasks)):
        result.append((starts[place], ends[place]))
    return result


def _share(running: Iterable[_Running], now: float, cores: float) -> None:
    """Where the tasks on a node ask for more cores than it has, they share them evenly."""
    asked: dict[int, float] = {}
    for task in running:
        for node, number in task.asked.items():
            asked[node] = asked.get(node, 0.0) + number
    for task in running:
        shares = (cores / asked[node] for node in task.asked if asked[node] > cores)
        task.go_at(min(shares, default=1.0), now)
