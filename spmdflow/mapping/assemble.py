"""A `Placed` from blocks, pool sizes and strategies: ranks, estimates of every call, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spmdflow.mapping.dataflow import Dataflow, Model
from spmdflow.mapping.estimate import Estimate, call_seconds, transition_seconds
from spmdflow.mapping.machine import Hardware
from spmdflow.mapping.memory import call_bytes, resident_bytes, total
from spmdflow.mapping.placed import Placed, PlacedPool
from spmdflow.mapping.search import Block
from spmdflow.mapping.strategy import Cut, Strategy
from spmdflow.mapping.table import CostTable


def assemble(
    table: CostTable,
    blocks: Sequence[Block],
    sizes: Sequence[int],
    rows: Sequence[np.ndarray],
    *,
    ranks: Sequence[Sequence[int]] | None = None,
) -> Placed:
    """From entries of a table; without ranks, pools follow one another, the largest first."""
    pools = []
    order = range(len(blocks)) if ranks is not None else _by_size(blocks, sizes)
    start = 0
    for place in order:
        own = ranks[place] if ranks is not None else range(start, start + sizes[place])
        start += sizes[place]
        strategies = {}
        for number, row in zip(blocks[place], rows[place].tolist()):
            entries = table.entries[number]
            generates = entries.model.rollout is not None
            strategies[entries.model.name] = entries.cut.strategy(row, generates=generates)
        pools.append(pool_of(table.dataflow, table.hardware, strategies, own))
    return placed_of(table.dataflow, pools)


def pool_memory(
    members: Sequence[tuple[Model, Strategy]], dataflow: Dataflow, hardware: Hardware
) -> dict[str, dict[str, float]]:
    """Bytes of a rank of a pool in each call (`model.method`), by what holds them.

    Residents of all members add; a call brings its own; a generation's KV cache is its
    `kv_cache_bytes`, whether or not it fits, else what is left of the usable memory. Of calls of
    one title, such as a greedy and a sampled generation, the one that needs most is kept.
    """
    resident: dict[str, float] = {}
    for model, strategy in members:
        for part, size in resident_bytes(model, Cut.of([strategy])).items():
            resident[part] = resident.get(part, 0.0) + float(size[0])
    names = {model.name: (model, strategy) for model, strategy in members}
    found: dict[str, dict[str, float]] = {}
    most: dict[str, float] = {}
    for call in dataflow.calls:
        if call.model not in names:
            continue
        model, strategy = names[call.model]
        parts = dict(resident)
        for part, size in call_bytes(model, call.kind, call.workload, Cut.of([strategy])).items():
            parts[part] = parts.get(part, 0.0) + float(np.ravel(size)[0])
        used = sum(parts.values())
        if used < most.get(call.title, 0.0):
            continue
        most[call.title] = used
        if call.kind == "generate":
            parts["kv_cache"] = _cache(model, hardware, used)
        found[call.title] = parts
    return found


def _by_size(blocks: Sequence[Block], sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(blocks)), key=lambda place: (-sizes[place], blocks[place]))


def _cache(model: Model, hardware: Hardware, used: float) -> float:
    assert model.rollout is not None, model.name
    fixed = model.rollout.kv_cache_bytes
    return hardware.usable_bytes - used if fixed is None else fixed


def pool_of(
    dataflow: Dataflow,
    hardware: Hardware,
    strategies: Mapping[str, Strategy],
    ranks: Sequence[int],
) -> PlacedPool:
    """A pool of models that are cut so, whether or not they fit."""
    members = [(dataflow.model(name), strategy) for name, strategy in strategies.items()]
    memory = pool_memory(members, dataflow, hardware)
    estimates: dict[int, Estimate] = {}
    stages = dict.fromkeys(dataflow.stages, 0.0)
    moved: set[str] = set()
    most, cache = 0.0, 0.0
    for number, call in enumerate(dataflow.calls):
        if call.model not in strategies:
            continue
        model, strategy = dataflow.model(call.model), strategies[call.model]
        parts = memory[call.title]
        free = parts.get("kv_cache", 0.0)
        cache = max(cache, free)
        found = call_seconds(call, model, strategy, hardware, kv_bytes=free)
        if call.kind == "generate" and call.model not in moved:
            moved.add(call.model)
            found = found + transition_seconds(model, strategy, hardware)
        estimates[number] = found
        stages[call.stage] += found.seconds
        most = max(most, sum(parts.values()))
    if not estimates:
        most = sum(float(total(resident_bytes(m, Cut.of([s])))[0]) for m, s in members)
    return PlacedPool(
        roles=tuple(strategies),
        num_ranks=len(ranks),
        ranks=tuple(ranks),
        strategies=dict(strategies),
        stage_seconds=stages,
        memory_bytes=most,
        estimates=estimates,
        kv_bytes=cache,
    )


def placed_of(dataflow: Dataflow, pools: Sequence[PlacedPool]) -> Placed:
    """A placement of these pools."""
    stages = {stage: max(pool.stage_seconds[stage] for pool in pools) for stage in dataflow.stages}
    return Placed(
        pools=tuple(pools),
        seconds=sum(stages.values()),
        stage_seconds=stages,
        titles={number: call.title for number, call in enumerate(dataflow.calls)},
        stages={number: call.stage for number, call in enumerate(dataflow.calls)},
        generators={m.name: m.weights_from for m in dataflow.models if m.weights_from},
    )
