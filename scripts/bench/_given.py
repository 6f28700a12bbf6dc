"""Placements that are given, as the simulators see them, and the smallest pool for some models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spmdflow.errors import ConfigError
from spmdflow.mapping.dataflow import Dataflow, Strategy
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.placed import Placed, place_pool, placed_of
from spmdflow.mapping.search import Options, best_of_partition
from spmdflow.mapping.table import CostTable

_LARGEST_WORLD = 1 << 14


def evaluate(
    dataflow: Dataflow,
    hardware: Hardware,
    pools: Sequence[tuple[Sequence[str], Sequence[int]]],
    *,
    strategies: Mapping[str, Strategy] | None = None,
) -> Placed:
    """A given placement, pools as (roles, ranks): with the given strategies, or the best ones.

    ConfigError if a role is missing or no strategy fits into memory.
    """
    names = [model.name for model in dataflow.models]
    placed = [role for roles, _ in pools for role in roles]
    if sorted(placed) != sorted(names):
        raise ConfigError(
            f"placement: got roles {placed}, expected each of {', '.join(names)} once; correct it"
        )
    if strategies is not None:
        return _assemble_given(dataflow, hardware, pools, strategies)
    table = CostTable(dataflow, hardware, sorted({len(ranks) for _, ranks in pools}))
    blocks = [tuple(sorted(names.index(role) for role in roles)) for roles, _ in pools]
    fronts = [table.front(block, len(ranks)) for block, (_, ranks) in zip(blocks, pools)]
    for front, (roles, ranks) in zip(fronts, pools):
        if not len(front.costs):
            raise ConfigError(
                f"placement: got {', '.join(roles)} on {len(ranks)} ranks, expected a strategy "
                f"that fits into {hardware.usable_bytes / 1e9:.1f} GB a rank; use more ranks, "
                f"or other pools"
            )
    ones = [Options(np.ones(len(front.costs), dtype=np.int64), front.costs) for front in fronts]
    best = best_of_partition(ones, len(ones))
    assert best is not None
    found = []
    for block, front, pick, (_, ranks) in zip(blocks, fronts, best[1], pools):
        choices = table.choices(block, len(ranks), front.entries[pick])
        found.append(place_pool(dataflow, hardware, choices, ranks))
    return placed_of(dataflow, found)


def memory_floor(
    dataflow: Dataflow, models: Sequence[str], hardware: Hardware, *, unit: int = 1
) -> int:
    """Fewest ranks, in multiples of `unit`, of a pool that holds these models (A_min)."""
    names = [model.name for model in dataflow.models]
    block = tuple(sorted(names.index(dataflow.model(name).name) for name in models))
    first = unit
    last = 8 * unit
    while first <= _LARGEST_WORLD:
        table = CostTable(dataflow, hardware, range(first, last + 1, unit))
        for candidate in table.ideal(block).sizes.tolist():
            if len(table.front(block, candidate).costs):
                return int(candidate)
        first = last + unit
        last = 2 * last
    raise ConfigError(
        f"placement: got {', '.join(models)}, which fit on no pool of up to {_LARGEST_WORLD} "
        f"ranks of {hardware.usable_bytes / 1e9:.1f} GB, expected a strategy that fits; use "
        f"smaller models, shorter sequences or engine.options=[recompute]"
    )


def _assemble_given(
    dataflow: Dataflow,
    hardware: Hardware,
    pools: Sequence[tuple[Sequence[str], Sequence[int]]],
    strategies: Mapping[str, Strategy],
) -> Placed:
    """From given pools and strategies, whether or not they fit; memory_bytes says so.

    ConfigError if a strategy's sizes do not multiply to its pool.
    """
    found = []
    for roles, ranks in pools:
        for role in roles:
            if strategies[role].num_ranks != len(ranks):
                raise ConfigError(
                    f"{role}: got strategy {strategies[role]} = {strategies[role].num_ranks} "
                    f"ranks, expected {len(ranks)}, the size of its pool; change a size"
                )
        choices = [(m, strategies[m.name]) for m in dataflow.models if m.name in roles]
        found.append(place_pool(dataflow, hardware, choices, ranks))
    return placed_of(dataflow, found)
