"""`Placed`: a placement with its strategies and predicted seconds, for the setting `placement`.

`call_seconds` predicts the `CallSeconds` of one call under one strategy, by cause. `assemble`
creates a placement from entries of a cost table. `explain` compares the placements of a `Ranking`,
the result of a search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdflow.config.parallel import count_of
from spmdflow.errors import ConfigError
from spmdflow.mapping.dataflow import Dataflow, Model, ModelCall, Strategy
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.memory import offload_seconds, pool_memory, resident_bytes
from spmdflow.mapping.search import ModelSet
from spmdflow.mapping.seconds import (
    add_parts,
    concurrency,
    generation_parts,
    pass_parts,
    rows_per_replica,
    total,
    transition_seconds,
)
from spmdflow.mapping.table import CostTable
from spmdflow.mapping.unequal import (
    GenerationEstimate,
    SharedRows,
    estimate_generation,
    pass_parts_by_row,
)


@dataclass(frozen=True)
class CallSeconds:
    """Seconds of one call, by cause."""

    parts: dict[str, float]
    notes: tuple[str, ...] = ()
    """Further facts, such as the number of waves of a generation."""

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return total(self.parts)

    @property
    def limit(self) -> str:
        """Name of the largest part: compute, memory, weights, kv_read, tensor_parallel, ..."""
        return max(self.parts, key=lambda name: self.parts[name])

    def __add__(self, other: CallSeconds) -> CallSeconds:
        return CallSeconds(add_parts(self.parts, other.parts), self.notes + other.notes)


@dataclass(frozen=True)
class PlacedPool:
    """One pool: its models, their strategies, and the predicted seconds of their calls."""

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    strategies: Mapping[str, Strategy]
    moved: Mapping[str, tuple[str, ...]]
    """Offloaded parts by model."""
    stage_seconds: Mapping[str, float]
    """Sum of the pool's calls of each stage."""
    memory_bytes: float
    """Peak memory of a rank."""
    estimates: Mapping[int, CallSeconds]
    """By the call's number in the dataflow; a generation includes the transition before it."""

    def __str__(self) -> str:
        return f"{{{', '.join(self.roles)}}}@{len(self.ranks)}"

    def cut_of(self, role: str) -> str:
        """Such as t8p1d2-offload(optimizer)."""
        moved = "+".join(self.moved.get(role, ()))
        return f"{self.strategies[role]}" + f"-offload({moved})" * bool(moved)


@dataclass(frozen=True)
class Placed:
    """A placement of every model, and its predicted seconds of one step."""

    pools: tuple[PlacedPool, ...]
    seconds: float
    stage_seconds: Mapping[str, float]
    """Seconds of the slowest pool of each stage."""
    calls: tuple[ModelCall, ...]
    """Calls of the dataflow, in order."""
    generators: Mapping[str, str]
    """Models that only generate -> the trained model whose settings and weights they use."""

    @property
    def limit(self) -> tuple[str, str, str, str]:
        """(stage, pool, call, cause): the largest part of the slowest stage's slowest pool."""
        stage = max(self.stage_seconds, key=lambda name: self.stage_seconds[name])
        return stage, *self.limit_of(stage)

    def limit_of(self, stage: str) -> tuple[str, str, str]:
        """Return (pool, call, cause) of a stage: its slowest pool, longest call, largest part."""
        pool = max(self.pools, key=lambda one: one.stage_seconds.get(stage, 0.0))
        calls = {}
        for n, e in pool.estimates.items():
            if self.calls[n].stage == stage:
                calls[n] = e
        number = max(calls, key=lambda n: calls[n].seconds)
        return str(pool), self.calls[number].title, calls[number].limit

    @property
    def title(self) -> str:
        """Such as {actor, reference}@48 | {critic, reward}@48."""
        return " | ".join(map(str, self.pools))

    def pool_of(self, role: str) -> PlacedPool:
        """The pool of a role."""
        return next(pool for pool in self.pools if role in pool.roles)

    def to_config(self) -> dict[str, dict[str, list[Any]]]:
        """Return the value of the setting `placement`: pool name -> roles and ranks.

        A pool is named by its roles, such as actor+critic.
        """
        config: dict[str, dict[str, list[Any]]] = {}
        for pool in self.pools:
            config["+".join(pool.roles)] = {"roles": list(pool.roles), "ranks": list(pool.ranks)}
        return config

    def engine_overrides(self) -> dict[str, str]:
        """Return the settings that give every role its layout, such as actor.engine.layout -> t2p1.

        Roles that generate also have rollout.layout, and roles that recompute
        engine.options=[recompute]. A separate generator has only the rollout.layout of the model
        whose weights it uses.
        """
        overrides = {}
        for pool in self.pools:
            for role, strategy in pool.strategies.items():
                generation = f"t{strategy.gen_tp}p{strategy.gen_pp}"
                if role in self.generators:
                    overrides[f"{self.generators[role]}.rollout.layout"] = generation
                    continue
                experts = f"e{strategy.ep}" if strategy.ep > 1 else ""
                context = f"c{strategy.cp}" if strategy.cp > 1 else ""
                layout = f"t{strategy.tp}p{strategy.pp}{context}{experts}"
                overrides[f"{role}.engine.layout"] = layout
                if strategy.gen_tp:
                    overrides[f"{role}.rollout.layout"] = generation
                if strategy.recompute:
                    overrides[f"{role}.engine.options"] = "[recompute]"
        return overrides


def call_seconds(
    call: ModelCall,
    model: Model,
    cut: Strategy,
    hardware: Hardware,
    *,
    kv_bytes: float = 0.0,
    rows: Sequence[SharedRows] = (),
) -> CallSeconds:
    """Return the seconds of one call by cause (paper Appendix C), without the weight transition.

    The copies of offloaded parts are included. A call with fixed_seconds has only these. Raises
    ConfigError if a generation has no room for one sequence.
    kv_bytes: cache of one rank in a generation.
    rows: of each rank in each optimizer step, with their own lengths; (): all have the mean length.
    """
    workload = call.workload
    notes = tuple[str, ...]()
    if call.fixed_seconds is not None:
        return CallSeconds({"fixed": call.fixed_seconds})
    trains = call.kind == "train"
    if call.kind != "generate" and rows:
        parts = pass_parts_by_row(
            model, rows, cut, hardware, trains=trains, num_forwards=workload.num_forwards
        )
    elif call.kind != "generate":
        parts = pass_parts(model, workload, cut, hardware, trains=trains)
    else:
        concurrent = concurrency(model, workload, cut, kv_bytes)
        if concurrent < 1:
            raise ConfigError(
                f"{model.name}: got {kv_bytes / 1e9:.2f} GB of KV cache a rank under {cut}, "
                f"expected room for one sequence of {workload.tokens} tokens; raise the generation "
                f"sizes, use more ranks or share the pool with fewer models"
            )
        if rows:
            result = estimate_generation(model, rows[0], cut, hardware, slots=int(concurrent))
            parts = result.parts
            notes = (_tail_text(result, int(concurrent)),)
        else:
            count = rows_per_replica(workload, cut)
            notes = (f"{int(count)} sequences a replica in {int(-(-count // concurrent))} waves",)
            parts = generation_parts(model, workload, cut, hardware, kv_bytes=kv_bytes)
    if model.engine.moved:
        parts = parts | {"offload": offload_seconds(model, call.kind, cut, hardware)}
    return CallSeconds({name: float(one) for name, one in parts.items()}, notes)


def _tail_text(result: GenerationEstimate, slots: int) -> str:
    """Return the note of a generation of rows of unequal lengths: its rows and its tail."""
    return (
        f"{result.num_rows} sequences a replica, at most {slots} at once, the longest of "
        f"{result.longest} tokens; for {result.tail_seconds:.3g} s less than a quarter of its "
        f"largest batch is left"
    )


TIE = 1.01
"""Placements within one percent of the best count as equal."""


@dataclass(frozen=True)
class Ranking:
    """The best placement of each of the best partitions, best first."""

    best: tuple[Placed, ...]
    num_partitions: int
    """All set partitions of the models, including those that do not fit."""
    num_ranks: int
    unit: int
    """Pool sizes are multiples of it."""
    seconds_searched: float

    @property
    def is_tie(self) -> bool:
        """Whether the second placement is within one percent of the first."""
        return len(self.best) > 1 and self.best[1].seconds <= TIE * self.best[0].seconds


def assemble(
    table: CostTable,
    blocks: Sequence[ModelSet],
    sizes: Sequence[int],
    rows: Sequence[np.ndarray],
) -> Placed:
    """Return a placement from entries of a table.

    Pools have consecutive ranks from 0 on, the largest pool first.
    blocks, sizes, rows: of each pool, its models, its number of ranks and its models' entries.
    """
    pools: list[PlacedPool] = []
    for number in sorted(range(len(blocks)), key=lambda number: (-sizes[number], blocks[number])):
        start = sum(len(pool.ranks) for pool in pools)
        choices = table.choices(blocks[number], sizes[number], rows[number])
        ranks = range(start, start + sizes[number])
        pools.append(place_pool(table.dataflow, table.hardware, choices, ranks))
    return placed_of(table.dataflow, pools)


def place_pool(
    dataflow: Dataflow,
    hardware: Hardware,
    choices: Sequence[tuple[Model, Strategy]],
    ranks: Sequence[int],
) -> PlacedPool:
    """Return a pool of models with these strategies and its predictions, whether or not they fit.

    A model's first generation includes the weight transition. Raises ConfigError only if a
    generation has no room for one sequence.
    """
    members = {}
    for model, strategy in choices:
        members[model.name] = (model, strategy)
    memory = pool_memory(choices, dataflow, hardware)
    resident = sum(total(resident_bytes(*member)) for member in members.values())
    estimates: dict[int, CallSeconds] = {}
    stages = dict.fromkeys(dataflow.stages, 0.0)
    moved: set[str] = set()
    for number, call in enumerate(dataflow.calls):
        if call.model not in members:
            continue
        cache = memory[call.title].get("kv_cache", 0.0)
        seconds_of_call = call_seconds(call, *members[call.model], hardware, kv_bytes=cache)
        if call.kind == "generate" and call.model not in moved:
            moved.add(call.model)
            seconds = transition_seconds(*members[call.model], hardware)
            seconds_of_call = seconds_of_call + CallSeconds({"transition": float(seconds)})
        estimates[number] = seconds_of_call
        stages[call.stage] += seconds_of_call.seconds
    return PlacedPool(
        roles=tuple(members),
        ranks=tuple(ranks),
        strategies={model.name: strategy for model, strategy in choices},
        moved={model.name: model.engine.moved for model, _ in choices if model.engine.moved},
        stage_seconds=stages,
        memory_bytes=max((total(parts) for parts in memory.values()), default=float(resident)),
        estimates=estimates,
    )


def placed_of(dataflow: Dataflow, pools: Sequence[PlacedPool]) -> Placed:
    """Return a placement of these pools.

    A stage lasts as long as its slowest pool, and the step is the sum of its stages.
    """
    stages = {}
    for stage in dataflow.stages:
        stages[stage] = max(pool.stage_seconds[stage] for pool in pools)
    return Placed(
        pools=tuple(pools),
        seconds=sum(stages.values()),
        stage_seconds=stages,
        calls=dataflow.calls,
        generators={m.name: m.weights_from for m in dataflow.models if m.weights_from},
    )


def explain(ranking: Ranking, *, count: int = 10) -> str:
    """Return a text: the verdict, and two lines for each of the best `count` placements.

    The first line has the ratio to the best, seconds of a step, pools, seconds of each stage, the
    limiting stage, call and cause, and where the placement loses most against the best. The second
    has the layout and offloaded parts of each role.
    """
    best = ranking.best[0]
    num_models = sum(len(pool.roles) for pool in best.pools)
    lines = [
        f"{count_of(ranking.num_partitions, 'partition')} of {count_of(num_models, 'model')} on "
        f"{count_of(ranking.num_ranks, 'rank')}, pools in multiples of {ranking.unit}; searched in "
        f"{ranking.seconds_searched:.2f} s",
        _verdict_text(ranking),
    ]
    for number, placed in enumerate(ranking.best[:count], 1):
        lines.append(_placement_line(number, placed, best))
        cuts = (f"{role} {pool.cut_of(role)}" for pool in placed.pools for role in pool.roles)
        lines.append(f"      {', '.join(cuts)}")
    return "\n".join(lines)


def reason(placed: Placed, best: Placed) -> str:
    """Return where a placement loses most seconds against the best, and what it gains elsewhere.

    "the same" if no stage is slower.
    """
    losses = {
        stage: seconds - best.stage_seconds.get(stage, 0.0)
        for stage, seconds in placed.stage_seconds.items()
    }
    stage = max(losses, key=lambda name: losses[name])
    if losses[stage] <= 0:
        return "the same"
    gains = -sum(loss for loss in losses.values() if loss < 0)
    pool, call, cause = placed.limit_of(stage)
    gained = f", gains {gains:.3g} s elsewhere" if gains > 0 else ""
    return f"loses {losses[stage]:.3g} s in {stage} ({call} on {pool}: {cause}){gained}"


def _verdict_text(ranking: Ranking) -> str:
    """Return the best placement and its lead over the next, or a tie.

    Several placements within 1 % of the best are a tie. Other texts say that there is one model, or
    that only one placement fits.
    """
    best = ranking.best[0]
    equals = []
    for placed in ranking.best:
        if placed.seconds <= TIE * best.seconds:
            equals.append(placed)
    if len(equals) > 1:
        titles = "; ".join(placed.title for placed in equals)
        return f"a tie: {len(equals)} placements within 1 %, the first is taken: {titles}"
    if ranking.num_partitions == 1:
        return f"one model: there is one way to share ranks, {best.title}"
    if len(ranking.best) == 1:
        return f"only {best.title} fits"
    ratio = ranking.best[1].seconds / best.seconds
    return f"best: {best.title}; the next costs {100 * (ratio - 1):.1f} % more"


def _placement_line(number: int, placed: Placed, best: Placed) -> str:
    """Return the first line of a placement in `explain`. number: its place in the ranking."""
    stages = ", ".join(f"{name} {seconds:.3g}" for name, seconds in placed.stage_seconds.items())
    stage, _, call, cause = placed.limit
    why = f"limit: {cause} of {call} in {stage}"
    if placed is not best:
        why += f"; {reason(placed, best)}"
    ratio = placed.seconds / best.seconds
    return f"{number:4d}. x{ratio:.3f}  {placed.seconds:.4g} s  {placed.title}  [{stages}]  {why}"
