"""Seconds and memory of a traced step, by the simulators of `mapping` on the trace's own order.

A call starts when all its ranks have finished earlier calls and its rows have arrived. So pools
overlap as in the trace, not by a table of stages. A generator that got its rows in an earlier step
has worked on them since then: a step takes the longer of generation and of everything else.

On CPUs, calls that run at the same time share the cores. Every rank of a running task demands one
core for the part of the time in which it works. If the ranks of a node demand more cores than the
node has, they share them evenly. A task on several nodes runs at the speed of the slowest node.
`cores=inf` means that every rank has a device of its own.

All times come from one file of coefficients. Nothing is fitted to the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import numpy as np

from spmdflow.errors import ConfigError
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.memory import pool_memory, state_bytes
from spmdflow.mapping.placed import CallSeconds, call_seconds
from spmdflow.mapping.seconds import add_parts, checksum_seconds, transition_seconds
from spmdflow.mapping.unequal import SharedRows
from spmdflow.plan.notes import add_attention_notes, attention_bytes, experts_note
from spmdflow.plan.record import Key, Problem, Tokens, Trace, row_edges
from spmdflow.plan.weight import WeightPlan
from spmdflow.plan.workload import Simulated, rows_by_rank, simulate_calls
from spmdflow.runtime.call import Call
from spmdflow.runtime.executor import COMPUTE


@dataclass(frozen=True)
class CallTime:
    """When a call runs."""

    call: Call
    start: float
    end: float
    limit: str = ""
    """Its largest part: compute, memory, kv_read, tensor_parallel, ...; empty: not simulated."""
    notes: tuple[str, ...] = ()
    kind: str = ""
    """generate, infer or train; empty: not simulated."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of a rank of one pool while one call runs or a model starts, by what uses it."""

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

    @property
    def is_start(self) -> bool:
        """Whether it is the start of a model, `NAME.build`."""
        return self.phase.endswith(".build")


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and memory of a step."""

    hardware: str
    calls: tuple[CallTime, ...] = ()
    memory: tuple[PhaseMemory, ...] = ()
    seconds: float = 0.0
    """Duration of the step, until its last call ends."""
    tokens: float = 0.0
    """Prompt and response tokens of the step's generations, or of its updates if none."""
    problems: tuple[Problem, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    """Models without a simulator, each with the reason."""
    attention_bytes: Mapping[str, float] = field(default_factory=dict)
    """What all ranks of a trained model send for attention in an optimizer step, by its name;
    without models whose ranks have whole rows."""

    @property
    def tokens_per_second(self) -> float:
        """0 if nothing takes time."""
        if self.seconds:
            return self.tokens / self.seconds
        return 0.0

    def stage_seconds(self) -> dict[str, float]:
        """Return seconds by method, the sum over its calls, as a run's time/<method>_seconds.

        Calls of evaluations and calls without a method (fetches) are omitted.
        """
        seconds: dict[str, float] = {}
        for timed in self.calls:
            method = timed.call.method
            if method and timed.call.phase == "train":
                seconds[method] = seconds.get(method, 0.0) + timed.seconds
        return seconds


def predict(
    trace: Trace,
    step_calls: Sequence[Call],
    hardware: Hardware,
    *,
    weights: Sequence[WeightPlan] = (),
    by_row: bool = False,
) -> Prediction:
    """Return the predicted seconds of every call of a step, and memory by pool and phase.

    A phase that needs more than hardware.usable_bytes, or a generation whose KV cache has no room
    for one sequence, becomes an entry of `problems` and raises nothing. The step lasts until its
    last call ends.
    weights: `weight_plans` of the trace. For a model without a plan, or whose bytes by edge are
    unknown, the seconds of a weight sync follow the paper's formula (Table 2).
    by_row: every row counts with its own length where the trace knows it; otherwise all rows of a
    call with their mean.
    """
    step = simulate_calls(trace, step_calls)
    memory = _memory(trace, step, hardware)
    problems = [_memory_problem(phase, step, hardware) for phase in _full_phases(memory.values())]
    planned = {}
    for plan in weights:
        if plan.inter_bytes >= 0:
            planned[plan.target] = plan
    rows = _rows_by_rank(trace, step_calls, step) if by_row else {}
    estimates = _estimates(step, hardware, memory, planned, problems, rows)
    sent = attention_bytes(trace, step_calls, step)
    add_attention_notes(estimates, step, sent)
    calls = _schedule(step_calls, step, estimates, hardware)
    ahead = _generations_begun_earlier(trace, step_calls, step)
    if ahead and hardware.gpus_per_node <= hardware.cores:  # otherwise both share the cores
        estimates = _overlap_with_training(estimates, ahead, step_calls, step, hardware)
        calls = _schedule(step_calls, step, estimates, hardware)
    tokens = _counted_tokens(trace, step)
    return Prediction(
        hardware=hardware.name,
        calls=tuple(calls),
        memory=tuple(memory.values()),
        seconds=max((timed.end for timed in calls), default=0.0),
        tokens=sum(t.num_rows * (t.prompts + t.responses) for t in tokens),
        problems=tuple(problems),
        without=step.without,
        attention_bytes=sent,
    )


def _counted_tokens(trace: Trace, step: Simulated) -> list[Tokens]:
    """Return the `Tokens` of each generation, or of each update if nothing generates."""
    kinds: dict[str, list[Tokens]] = {"generate": [], "train": []}
    for key, model_call in step.calls.items():
        if model_call.kind in kinds:
            kinds[model_call.kind].append(trace.tokens[key])
    return kinds["generate"] or kinds["train"]


def _memory(trace: Trace, step: Simulated, hardware: Hardware) -> dict[str, PhaseMemory]:
    """Return a rank's memory in each phase, by phase title such as "actor.generate_sequences".

    The resident states of all models of a pool add up. Pools without a simulated model are skipped.
    A KV cache that would be negative counts as 0. `on_host` has the part of the pool's parameters
    and optimizer that is not on the device during the phase; it is empty for the start of a model.
    """
    phases: dict[str, PhaseMemory] = {}
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
            on_host = {}
            for part in ("parameters", "optimizer"):
                size = float(state[part] - parts.get(part, 0.0))
                if size > 0:
                    on_host[part] = size
            phase = PhaseMemory(pool, title, dict(parts), hardware.usable_bytes, on_host)
            if phase.is_start:  # some models are not there yet, so this is not what is offloaded
                phase = replace(phase, on_host={})
            phases[title] = phase
    return phases


def _full_phases(phases: Iterable[PhaseMemory]) -> list[PhaseMemory]:
    """Return the phases that need more than a plan may fill.

    The start of a model counts only if no other phase of its pool does: what is too large there is
    too large in a call as well.
    """
    full = [phase for phase in phases if phase.total > phase.budget * 1.0001]
    pools = {phase.pool for phase in full if not phase.is_start}
    return [phase for phase in full if not phase.is_start or phase.pool not in pools]


def _memory_problem(phase: PhaseMemory, step: Simulated, hardware: Hardware) -> Problem:
    """Return the Problem of a phase that needs more than the usable memory.

    Its text ends with the setting that shrinks the largest part. If everything except the KV cache
    fits, the KV cache counts as the largest part.
    """
    largest = max(phase.parts, key=lambda name: phase.parts[name])
    role = phase.phase.partition(".")[0]
    cache = phase.parts.get("kv_cache", 0.0)
    if cache and phase.total - cache <= hardware.usable_bytes:
        largest = "kv_cache"  # everything else fits
    if step.dataflow is not None:
        rollout = step.dataflow.model(role).rollout
    else:
        rollout = None
    is_fixed = rollout is not None and rollout.facts.fixed_cache
    knob = {
        "activations": f"set {role}.engine.options=[recompute] or a smaller "
        f"{role}.engine.micro_batch_tokens",
        "logits": f"set a smaller {role}.engine.micro_batch_tokens",
        "kv_cache": f"lower {role}.rollout.{'kv_cache_gib' if is_fixed else 'max_batch_size'}",
        "frozen_models": f"take a model out of {role}.rollout.episode.models",
        "optimizer": f"raise p or t of {role}.engine.layout, or {role}.engine.offload=[optimizer]",
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
    weights: Mapping[str, WeightPlan],
    problems: list[Problem],
    rows: Mapping[Key, tuple[SharedRows, ...]],
) -> dict[Key, CallSeconds]:
    """Return the seconds of each simulated call, by the call's key.

    A model's first generation includes its weight sync: by its plan in `weights`, otherwise by the
    paper's formula. A generation whose KV cache has no room for one sequence adds an entry to
    `problems`, and is then estimated with a practically unlimited cache.
    """
    estimates: dict[Key, CallSeconds] = {}
    synced: set[str] = set()
    for key, model_call in step.calls.items():
        assert step.dataflow is not None
        model = step.dataflow.model(model_call.model)
        strategy = step.strategies[model_call.model]
        generates = model_call.kind == "generate"
        cache = memory[model_call.title].parts.get("kv_cache", 0.0) if generates else 0.0
        own = rows.get(key, ())
        call = partial(call_seconds, model_call, model, strategy, hardware, rows=own)
        try:
            estimate = call(kv_bytes=cache)
        except ConfigError as err:
            problems.append(Problem("memory", str(err)))
            estimate = call(kv_bytes=1e15)
        if generates and model_call.model not in synced:
            synced.add(model_call.model)
            if model_call.model in weights:
                estimate = estimate + weight_sync_seconds(weights[model_call.model], hardware)
            else:
                seconds = transition_seconds(model, strategy, hardware)
                estimate = estimate + CallSeconds({"transition": float(seconds)})
            checksum = float(checksum_seconds(model, strategy, hardware))
            estimate = estimate + CallSeconds({"checksum": checksum})
        if model_call.kind == "train" and strategy.ep > 1:
            undivided = call_seconds(
                model_call, model, replace(strategy, ep=1), hardware, kv_bytes=cache, rows=own
            )
            note = experts_note(model, strategy, undivided.seconds)
            estimate = estimate + CallSeconds({}, (note,))
        estimates[key] = estimate
    return estimates


def _rows_by_rank(
    trace: Trace, step_calls: Sequence[Call], step: Simulated
) -> dict[Key, tuple[SharedRows, ...]]:
    """Return the rows of each rank in every simulated call, by the call's key."""
    result = {}
    for call in step_calls:
        if call.key in step.calls:
            result[call.key] = rows_by_rank(trace, call, step.calls[call.key].kind)
    return result


def _generations_begun_earlier(
    trace: Trace, step_calls: Sequence[Call], step: Simulated
) -> list[Key]:
    """Return the generations whose rows were given to their generator in an earlier step.

    Such a generator works on them while the rows of the earlier step are trained.
    """
    keys = []
    for call in step_calls:
        rows = trace.tokens.get(call.key)
        is_known = rows is not None and rows.by_row is not None
        if call.key not in step.calls or step.calls[call.key].kind != "generate" or not is_known:
            continue
        assert rows is not None and rows.by_row is not None
        for earlier in trace.calls:
            known = trace.tokens.get(earlier.key)
            if earlier.model != call.model or earlier.step >= call.step or known is None:
                continue
            if known.by_row is not None and np.isin(rows.by_row.ids, known.by_row.ids).any():
                keys.append(call.key)
                break
    return keys


def _overlap_with_training(
    estimates: Mapping[Key, CallSeconds],
    ahead: Sequence[Key],
    step_calls: Sequence[Call],
    step: Simulated,
    hardware: Hardware,
) -> dict[Key, CallSeconds]:
    """Return the estimates with less time for generations that were begun a step ahead.

    Such a generation runs while the other calls of a step do. The step waits only for the seconds
    by which it is longer than these.
    """
    without = dict(estimates)
    for key in ahead:
        without[key] = CallSeconds({"hidden": 0.0})
    rest = max(timed.end for timed in _schedule(step_calls, step, without, hardware))
    result = dict(estimates)
    for key in ahead:
        whole = estimates[key]
        left = max(whole.seconds - rest, 0.0)
        share = left / whole.seconds
        parts = {name: seconds * share for name, seconds in whole.parts.items()}
        note = f"{whole.seconds:.4g} s, begun a step ahead; the step waits for {left:.3g} s of it"
        result[key] = CallSeconds(parts, (*whole.notes, note))
    return result


def weight_sync_seconds(plan: WeightPlan, hardware: Hardware) -> CallSeconds:
    """Return the seconds of one weight sync, as the part "transition". They are 0 without edges.

        max(bytes of the busiest rank / link_rate, bytes entering the busiest node / network_rate)
        + collective_base_seconds + one hop for each source of the rank that has most sources

    The ranks of a node share its network, and a broadcast enters the node once. Hops cross the
    network if any bytes enter a node.
    """
    if not plan.edges:
        return CallSeconds({"transition": 0.0})
    node_bytes = max(plan.entering.values(), default=0)
    rank_bytes = max(plan.received.values())
    bytes_seconds = max(rank_bytes / hardware.link_rate, node_bytes / hardware.network_rate)
    num_sources = Counter(rank for _, rank in plan.edges)
    hop_seconds = hardware.network_hop_seconds if node_bytes else hardware.link_hop_seconds
    latency = max(num_sources.values()) * hop_seconds + hardware.collective_base_seconds
    return CallSeconds({"transition": bytes_seconds + latency})


def _schedule(
    step_calls: Sequence[Call],
    step: Simulated,
    estimates: Mapping[Key, CallSeconds],
    hardware: Hardware,
) -> list[CallTime]:
    """Return start and end of every call of the compute lane, in the order of `step_calls`.

    Each call starts as early as its ranks and its rows allow. Transfers delay the calls that read
    their rows, and have no entry of their own.
    """
    tasks = _tasks(step_calls, estimates, hardware)
    spans = timeline(tasks, node_size=hardware.gpus_per_node, cores=hardware.cores)
    calls = [call for call in step_calls if call.lane == COMPUTE]
    times = []
    for call, (start, end) in zip(calls, spans, strict=True):
        estimate = estimates.get(call.key)
        if estimate is None:
            times.append(CallTime(call, start, end))
        else:
            kind = step.calls[call.key].kind
            times.append(CallTime(call, start, end, estimate.limit, estimate.notes, kind))
    return times


def _tasks(
    step_calls: Sequence[Call], estimates: Mapping[Key, CallSeconds], hardware: Hardware
) -> list[Task]:
    """Return one task for each call of the compute lane, in the order of `step_calls`.

    A task follows the latest earlier task of each of its ranks. It also follows the transfers
    listed directly before its call. A transfer takes its seconds from the end of the task that made
    the rows, or from the start of the step if they were made before it. A call without an estimate
    takes hardware.call_seconds. A rank is busy except in the pipeline bubble: 1 - bubble / seconds.
    """
    transfer_seconds = _transfer_seconds(step_calls, hardware)
    last: dict[int, int] = {}
    tasks: list[Task] = []
    numbers: dict[int, int] = {}
    rows: list[tuple[int | None, float]] = []
    for call in step_calls:
        if call.lane != COMPUTE:
            seconds = transfer_seconds.get(call.key, 0.0)
            rows.append((numbers.get(call.command["result"]), seconds))
            continue
        estimate = estimates.get(call.key)
        before = set()
        for rank in call.commands:
            if rank in last:
                before.add((last[rank], 0.0))
        earliest = 0.0
        for index, wait in rows:
            if index is None:
                earliest = max(earliest, wait)
            else:
                before.add((index, wait))
        seconds = hardware.call_seconds
        busy = 1.0
        if estimate:
            seconds = estimate.seconds
            if seconds:  # a rank works except in the pipeline's bubble
                busy -= estimate.parts.get("bubble", 0.0) / seconds
        tasks.append(Task(seconds, call.ranks, tuple(before), earliest, busy))
        numbers[call.number] = len(tasks) - 1
        last |= dict.fromkeys(call.commands, len(tasks) - 1)
        rows = []
    return tasks


def _transfer_seconds(step_calls: Sequence[Call], hardware: Hardware) -> dict[Key, float]:
    """Return the seconds of each transfer that moves rows between ranks, by its key.

    collective_base_seconds + bytes sent and received by the busiest rank / (network_rate / ranks of
    a node). Rows travel over gloo, between nodes and inside of them alike.
    """
    rate = hardware.network_rate / hardware.gpus_per_node
    busy: dict[Key, Counter[int]] = {}
    for edge in row_edges(step_calls):
        ranks = busy.setdefault(edge.release, Counter())
        ranks[edge.source] += edge.num_bytes
        ranks[edge.destination] += edge.num_bytes
    base = hardware.collective_base_seconds
    return {index: base + max(ranks.values()) / rate for index, ranks in busy.items()}


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
    """Fraction of the time in which a rank works. In a pipeline bubble, for example, it waits."""


@dataclass
class _RunningTask:
    """A task that has started, and the speed at which it runs now."""

    demand: Mapping[int, float]
    """Node -> cores that the task's ranks on it demand."""
    left: float
    """Seconds of work when the speed was last set."""
    since: float
    end: float
    speed: float = 1.0

    def set_speed(self, speed: float, now: float) -> None:
        """Run at `speed` from the time `now` on: update the work that is left and `end`.

        left -= (now - since) * old speed; end = now + left / speed. An equal speed changes nothing,
        so that rounding cannot move `end`.
        """
        if speed != self.speed:
            self.left -= (now - self.since) * self.speed
            self.since = now
            self.speed = speed
            self.end = now + self.left / speed


def timeline(
    tasks: Sequence[Task], *, node_size: float = math.inf, cores: float = math.inf
) -> list[tuple[float, float]]:
    """Return (start, end) of every task, in the order of `tasks`, each as early as possible.

    A task starts once `earliest` has passed and, for each (task, seconds) in `after`, that many
    seconds have passed since the earlier task's end. While the running tasks of a node demand more
    cores than it has, they share them evenly (`_share_cores`).
    node_size: ranks of a node, in rank order; cores: CPU cores of a node.
    """
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    running: dict[int, _RunningTask] = {}
    now = 0.0
    while len(ends) < len(tasks):
        begin = {  # inf: an earlier task has not ended
            index: max([task.earliest, *(ends.get(at, math.inf) + wait for at, wait in task.after)])
            for index, task in enumerate(tasks)
            if index not in starts
        }
        for index, time in begin.items():
            if time <= now:
                task = tasks[index]
                starts[index] = time
                nodes = Counter(int(rank // node_size) for rank in task.ranks)
                demand = {}
                for node, count in nodes.items():
                    demand[node] = count * task.busy
                running[index] = _RunningTask(demand, task.seconds, now, now + task.seconds)
        _share_cores(running.values(), now, cores)
        later = []
        for time in begin.values():
            if time > now:
                later.append(time)
        now = min([task.end for task in running.values()] + later)
        for index in [index for index, task in running.items() if task.end <= now]:
            ends[index] = running.pop(index).end
    spans = []
    for index in range(len(tasks)):
        spans.append((starts[index], ends[index]))
    return spans


def _share_cores(running: Iterable[_RunningTask], now: float, cores: float) -> None:
    """Set the speed of every running task from `now` on, in place.

    On a node whose tasks together demand more than `cores`, the speed is cores / demand, otherwise
    1. A task on several nodes gets the lowest of their speeds.
    """
    demand: dict[int, float] = {}
    for task in running:
        for node, number in task.demand.items():
            demand[node] = demand.get(node, 0.0) + number
    for task in running:
        shares = (cores / demand[node] for node in task.demand if demand[node] > cores)
        task.set_speed(min(shares, default=1.0), now)
