"""Algorithm 1 on cost tables, exactly: which sets of models share a pool, and how large each is.

A table gives, for every set of models, options: devices and a vector of seconds, one a stage. A set
may have several vectors for one size (strategies that trade one stage for another), none for some
sizes (memory), and sizes may cost more with more devices. The best choice minimises

    sum over stages of (max over pools of the vector)        pools' devices together at most N

over all set partitions of the models; devices may stay idle. Algorithm 1 as printed keeps a
reference to a placement that later iterations change; here a choice is a value.

The sum of maxima does not decompose over pools, so partial choices are kept as a Pareto front over
(devices used, maximum so far of each stage), and pruned where even all remaining devices for each
remaining pool would not bring them below a known cost. Neither step loses the optimum.
Knows no model and no hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Found = TypeVar("Found")
Array = np.ndarray
ModelSet = tuple[int, ...]
"""Numbers of the models of one pool, ascending."""

SLACK = 1 + 1e-12
"""Sums of the same numbers in another order differ by less."""
_BEAM = 64


@dataclass(frozen=True)
class Options:
    """What one set of models may cost: sizes (V,) int64 and seconds (V, stages) float64."""

    sizes: Array
    costs: Array

    def __len__(self) -> int:
        return len(self.sizes)


def partitions(number: int) -> Iterator[tuple[ModelSet, ...]]:
    """All set partitions of 0 .. number-1 (5, 15, 52 of 3, 4, 5), blocks by their lowest model."""

    def extend(blocks: tuple[ModelSet, ...], model: int) -> Iterator[tuple[ModelSet, ...]]:
        if model == number:
            yield blocks
            return
        for place, block in enumerate(blocks):
            yield from extend((*blocks[:place], (*block, model), *blocks[place + 1 :]), model + 1)
        yield from extend((*blocks, (model,)), model + 1)

    yield from extend((), 0)


def blocks_of(number: int) -> list[ModelSet]:
    """All sets of 0 .. number-1, by size, then in order."""
    masks = range(1, 1 << number)
    found = []
    for mask in masks:
        found.append(tuple(m for m in range(number) if mask >> m & 1))
    return sorted(found, key=lambda block: (len(block), block))


def best_partitions(
    bounds: Iterable[tuple[float, tuple[ModelSet, ...]]],
    best_of: Callable[[tuple[ModelSet, ...], float], tuple[float, Found] | None],
    keep: int,
) -> list[tuple[float, tuple[ModelSet, ...], Found]]:
    """(cost, partition, its choice) of at most `keep` partitions, best first.

    bounds: a least cost, and the partition. best_of: the exact best of a partition, None if
    it costs more than a limit. Partitions whose bound is above the worst that is kept are left
    out. Equal costs: fewer pools, then a fixed order.
    """
    found: list[tuple[float, tuple[ModelSet, ...], Found]] = []
    for bound, blocks in sorted(bounds):
        worst = found[keep - 1][0] if len(found) >= keep else np.inf
        if bound > worst * SLACK:
            break
        best = best_of(blocks, worst)
        if best is not None:
            found.append((best[0], blocks, best[1]))
            found = sorted(found, key=lambda one: (one[0], len(one[1]), one[1]))[:keep]
    return found


def least_cost(options: Sequence[Options], size: int) -> float:
    """A lower bound: every pool has all devices but the smallest sizes of the others."""
    floors = [int(one.sizes.min()) for one in options]
    rest = size - sum(floors)
    if rest < 0:
        return np.inf
    least = np.zeros(options[0].costs.shape[1])
    for one, floor in zip(options, floors):
        fits = one.costs[one.sizes <= rest + floor]
        least = np.maximum(least, fits.min(axis=0))
    return float(least.sum())


def best_of_partition(
    options: Sequence[Options], size: int, *, worst: float = np.inf
) -> tuple[float, tuple[int, ...]] | None:
    """(cost, option of each pool) of the cheapest choice; None if none costs at most `worst`."""
    floors = [int(one.sizes.min()) for one in options]
    if sum(floors) > size:
        return None
    order = sorted(range(len(options)), key=lambda place: (len(options[place]), place))
    ordered = [options[place] for place in order]
    bounds = _least_by_rest(ordered, size)
    known = _extended(ordered, size, bounds, worst, beam=_BEAM)
    worst = min(worst, known[0]) if known else worst
    exact = _extended(ordered, size, bounds, worst, beam=None) or known
    if exact is None:
        return None
    cost, picks = exact
    return cost, tuple(picks[order.index(place)] for place in range(len(options)))


def possible_sizes(options: Sequence[Options], place: int, size: int, worst: float) -> Array:
    """Sizes of one pool that could be part of a choice of at most `worst`."""
    one = options[place]
    others = []
    for number, other in enumerate(options):
        if number != place:
            others.append(other)
    floors = sum(int(other.sizes.min()) for other in others)
    reach = one.costs
    for other in others:
        left = size - floors + int(other.sizes.min()) - one.sizes
        least = _least_by_size(other, size)[np.maximum(left, 0)]
        reach = np.maximum(reach, np.where((left >= 0)[:, None], least, np.inf))
    return one.sizes[reach.sum(axis=1) <= worst * SLACK]


def undominated(options: Options) -> tuple[Options, Array]:
    """Options that no other dominates in size and every stage, and their indices."""
    points = np.column_stack([options.sizes.astype(np.float64), options.costs])
    points = np.where(np.isfinite(points), points, np.inf)
    finite = np.isfinite(points).all(axis=1)
    numbers = np.flatnonzero(finite)
    kept = numbers[pareto(points[finite])]
    return Options(options.sizes[kept], options.costs[kept]), kept


def pareto(points: Array) -> Array:
    """Indices of the rows of points (N, k) that no other row dominates; of equal rows the first.

    Sorted by a row's sum: only a row with a smaller or equal sum can dominate it.
    """
    order = np.lexsort((*points.T[::-1], points.sum(axis=1)))
    columns = np.ascontiguousarray(points[order].T)
    kept = []
    while len(order):
        kept.append(int(order[0]))
        better = columns[0, 1:] < columns[0, 0]
        for column in columns[1:]:
            better |= column[1:] < column[0]
        columns = columns[:, 1:][:, better]
        order = order[1:][better]
    return np.array(kept, dtype=np.int64)


def unbeaten(points: Array, front: Array) -> Array:
    """Indices of the rows (N, k) that no row of a front beats: <= everywhere, < somewhere."""
    columns = np.ascontiguousarray(points.T)
    order = np.arange(len(points))
    for row in front:
        alive = (columns <= row[:, None]).all(axis=0)
        for column, value in zip(columns, row):
            alive |= column < value
        columns = columns[:, alive]
        order = order[alive]
    return order


@dataclass
class _Front:
    """Partial choices: devices used, maxima so far, and where each came from."""

    used: Array
    costs: Array
    parent: Array
    pick: Array


def _extended(
    options: Sequence[Options], size: int, bounds: list[Array], worst: float, beam: int | None
) -> tuple[float, list[int]] | None:
    """Pools one after another; with a beam only the most promising partial choices are kept."""
    stages = options[0].costs.shape[1]
    zero = np.zeros(1, dtype=np.int64)
    fronts = [_Front(zero, np.zeros((1, stages)), zero, zero)]
    for place, one in enumerate(options):
        last = fronts[-1]
        used = (last.used[:, None] + one.sizes[None, :]).ravel()
        pairs = np.flatnonzero(used <= size - _floor_after(options, place))
        parent, pick = np.divmod(pairs, len(one))
        costs = np.maximum(last.costs[parent], one.costs[pick])
        reach = np.maximum(costs, bounds[place][size - used[pairs]]).sum(axis=1)
        alive = np.flatnonzero(reach <= worst * SLACK)
        if beam is not None and len(alive) > beam:
            alive = alive[np.argsort(reach[alive], kind="stable")[:beam]]
        elif place < len(options) - 1:
            alive = alive[pareto(np.column_stack([used[pairs][alive], costs[alive]]))]
        if not len(alive):
            return None
        fronts.append(_Front(used[pairs][alive], costs[alive], parent[alive], pick[alive]))
    totals = fronts[-1].costs.sum(axis=1)
    best = state = int(np.lexsort((fronts[-1].pick, fronts[-1].used, totals))[0])
    picks: list[int] = []
    for front in reversed(fronts[1:]):
        picks.append(int(front.pick[state]))
        state = int(front.parent[state])
    return float(totals[best]), picks[::-1]


def _floor_after(options: Sequence[Options], place: int) -> int:
    return sum(int(one.sizes.min()) for one in options[place + 1 :])


def _least_by_rest(options: Sequence[Options], size: int) -> list[Array]:
    """For each pool (size + 1, stages): by devices left, the least that the later pools cost if
    each gets all of them but the smallest sizes of the others."""
    by_size = [_least_by_size(one, size) for one in options]
    found = []
    for place in range(len(options)):
        bound = np.zeros_like(by_size[0])
        floors = _floor_after(options, place)
        for later in range(place + 1, len(options)):
            others = floors - int(options[later].sizes.min())
            shifted = np.full_like(bound, np.inf)
            shifted[others:] = by_size[later][: size + 1 - others]
            bound = np.maximum(bound, shifted)
        found.append(bound)
    return found


def _least_by_size(options: Options, size: int) -> Array:
    """(size + 1, stages): the least that a pool costs with at most so many devices."""
    least = np.full((size + 1, options.costs.shape[1]), np.inf)
    inside = options.sizes <= size
    np.minimum.at(least, options.sizes[inside], options.costs[inside])
    return np.minimum.accumulate(least, axis=0)
