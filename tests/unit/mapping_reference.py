"""Algorithm 1 as it is meant, by trying everything: what the fast search is compared with.

The paper's printed form stores `plm`, which the next allocation updates, as the best placement;
here every candidate is a new value. Allocations are all vectors of pool sizes, at least the floor
each, together at most N: a pool may leave devices idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spmdflow.mapping.dataflow import Model, Strategy, strategies_on
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.search import (
    ModelSet,
    Options,
    best_of_partition,
    best_partitions,
    least_cost,
    partitions,
    select_undominated,
)

Table = Mapping[ModelSet, Options]


def get_placements(number: int) -> Iterator[tuple[ModelSet, ...]]:
    """All set partitions, by trying every labelling of the models."""
    seen = set()
    for labels in itertools.product(range(number), repeat=number):
        groups = [tuple(m for m in range(number) if labels[m] == g) for g in range(number)]
        blocks = tuple(sorted(group for group in groups if group))
        if blocks not in seen:
            seen.add(blocks)
            yield blocks


def d_cost(vectors: Sequence[np.ndarray]) -> float:
    """Sum over stages of the slowest pool."""
    return float(np.max(np.stack(vectors), axis=0).sum())


def algorithm_1(table: Table, number: int, size: int) -> dict[tuple[ModelSet, ...], float]:
    """Partition -> least cost over allocations and vectors; partitions that do not fit left out."""
    best: dict[tuple[ModelSet, ...], float] = {}
    for blocks in get_placements(number):
        for picks in itertools.product(*(range(len(table[block])) for block in blocks)):
            chosen = [(table[b].sizes[i], table[b].costs[i]) for b, i in zip(blocks, picks)]
            if sum(int(count) for count, _ in chosen) > size:
                continue
            cost = d_cost([vector for _, vector in chosen])
            if np.isfinite(cost):
                best[blocks] = min(best.get(blocks, np.inf), cost)
    return best


@dataclass(frozen=True)
class Family:
    """Random tables of one form: every set has `vectors` options a size, some of them holes."""

    number: int
    size: int
    stages: int
    vectors: int
    highest: int
    """Costs are integers below this: ties are many where it is small."""
    holes: float


def random_costs(family: Family, count: int, seed: int) -> np.ndarray:
    """(count, sets, sizes, vectors, stages) float64; a hole is infinite."""
    rng = np.random.default_rng(seed)
    shape = (count, (1 << family.number) - 1, family.size, family.vectors)
    costs = rng.integers(0, family.highest, (*shape, family.stages)).astype(np.float64)
    costs[rng.random(shape) < family.holes] = np.inf
    return costs


def table_of(costs: np.ndarray, blocks: Sequence[ModelSet]) -> dict[ModelSet, Options]:
    """One random table, (sets, sizes, vectors, stages), as the search takes it."""
    found = {}
    for block, own in zip(blocks, costs):
        sizes = np.repeat(np.arange(1, own.shape[0] + 1), own.shape[1])
        rows = own.reshape(-1, own.shape[-1])
        fits = np.isfinite(rows).all(axis=1)
        found[block] = Options(sizes[fits], rows[fits])
    return found


def algorithm_1_of_many(
    family: Family, costs: np.ndarray, blocks: Sequence[ModelSet]
) -> np.ndarray:
    """(count, partitions) least costs of many tables at once; infinite where nothing fits."""
    place = {block: number for number, block in enumerate(blocks)}
    columns = []
    for parts in get_placements(family.number):
        best = np.full(len(costs), np.inf)
        for sizes in itertools.product(range(family.size), repeat=len(parts)):
            if sum(sizes) + len(parts) > family.size:
                continue
            for picks in itertools.product(range(family.vectors), repeat=len(parts)):
                chosen = [
                    costs[:, place[block], size, pick]
                    for block, size, pick in zip(parts, sizes, picks)
                ]
                best = np.minimum(best, np.maximum.reduce(chosen).sum(axis=1))
        columns.append(best)
    return np.stack(columns, axis=1)


def printed_algorithm_1(table: Table, number: int, size: int) -> tuple[float, dict[ModelSet, int]]:
    """Algorithm 1 as printed, for one vector a size: `plm` is one object that `plm.update` changes
    and that `best_plm_alloc` refers to. Returns C* and the placement that it then holds."""
    best_cost = np.inf
    best_mapping = {}
    for blocks in get_placements(number):
        plm: dict[ModelSet, int] = dict.fromkeys(blocks, 0)
        plm_cost = np.inf
        best_plm_alloc = plm
        for picks in itertools.product(*(range(len(table[block])) for block in blocks)):
            if sum(int(table[b].sizes[i]) for b, i in zip(blocks, picks)) > size:
                continue
            plm.update(zip(blocks, picks))
            cost = d_cost([table[b].costs[i] for b, i in plm.items()])
            if cost < plm_cost:
                plm_cost = cost
                best_plm_alloc = plm
        if plm_cost < best_cost:
            best_cost = plm_cost
            best_mapping = best_plm_alloc
    return best_cost, best_mapping


def printed_algorithm_2(num_ranks: int, node: int) -> list[tuple[int, int, float]]:
    """(t, p, d) that Algorithm 2 as printed tries on N = num_ranks devices, U = node."""
    sizes = itertools.product(range(1, node + 1), range(1, num_ranks // node + 1))
    return [(t, p, num_ranks / (p * t)) for t, p in sizes]


@dataclass(frozen=True)
class Choice:
    """One option for each pool of a partition."""

    cost: float
    blocks: tuple[ModelSet, ...]
    indices: tuple[int, ...]
    """Which option of each block's `Options`."""


def search(table: Table, number: int, size: int, *, keep: int) -> list[Choice]:
    """The package's search on a table: the best choice of each of the best partitions."""
    pruned = {block: select_undominated(options) for block, options in table.items()}
    bounds = [
        (least_cost([pruned[block][0] for block in blocks], size), blocks)
        for blocks in partitions(number)
        if all(len(pruned[block][0]) for block in blocks)
    ]

    def best_of(blocks: tuple[ModelSet, ...], worst: float) -> tuple[float, tuple[int, ...]] | None:
        return best_of_partition([pruned[b][0] for b in blocks], size, worst=worst)

    return [
        Choice(cost, blocks, tuple(int(pruned[b][1][pick]) for b, pick in zip(blocks, picks)))
        for cost, blocks, picks in best_partitions(bounds, best_of, keep)
    ]


def strategies(model: Model, num_ranks: int, hardware: Hardware) -> list[Strategy]:
    """The package's strategies of a model on so many ranks."""
    sizes, found = strategies_on(model, [num_ranks], hardware)
    return [found.one(i) for i in range(len(sizes))]
