"""Algorithm 1 on cost tables, exactly: which sets of models share a pool, and how large each is.

A table gives options for every set of models: a number of devices and a vector of seconds, one per
stage. A set may have several vectors for one size (strategies that trade one stage for another) or
none (memory), and may cost more with more devices. The best choice minimises

    sum over stages of (max over pools of the vector)        pools' devices together at most N

over all set partitions of the models. Devices may stay idle. Algorithm 1 as printed keeps a
reference to a placement that later iterations change; here a choice is a value.

The sum of maxima does not decompose over pools. Partial choices are therefore kept as a Pareto
front over (devices used, maximum so far of each stage). They are pruned if they would stay above a
known cost even with all remaining devices for each remaining pool. Neither step loses the optimum.
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
"""Tolerance: sums of the same numbers in another order differ by less."""
_BEAM = 64


@dataclass(frozen=True)
class Options:
    """Options of one set of models: sizes (V,) int64 and seconds (V, stages) float64."""

    sizes: Array
    costs: Array

    def __len__(self) -> int:
        return len(self.sizes)


def partitions(number: int) -> Iterator[tuple[ModelSet, ...]]:
    """Yield all set partitions of 0 .. number-1 (5, 15, 52 for 3, 4, 5).

    The blocks of a partition are ordered by their lowest model, and the models of a block ascend.
    """

    def extend(blocks: tuple[ModelSet, ...], model: int) -> Iterator[tuple[ModelSet, ...]]:
        """Yield `blocks` with the models `model` .. number-1 added in all ways.

        Each model joins one of the blocks or begins a new one at the end.
        """
        if model == number:
            yield blocks
            return
        for index, block in enumerate(blocks):
            yield from extend((*blocks[:index], (*block, model), *blocks[index + 1 :]), model + 1)
        yield from extend((*blocks, (model,)), model + 1)

    yield from extend((), 0)


def model_sets(number: int) -> list[ModelSet]:
    """Return all sets of 0 .. number-1 except the empty one, by size, then in order."""
    masks = range(1, 1 << number)
    blocks = []
    for mask in masks:
        blocks.append(tuple(m for m in range(number) if mask >> m & 1))
    return sorted(blocks, key=lambda block: (len(block), block))


def best_partitions(
    bounds: Iterable[tuple[float, tuple[ModelSet, ...]]],
    best_of: Callable[[tuple[ModelSet, ...], float], tuple[float, Found] | None],
    keep: int,
) -> list[tuple[float, tuple[ModelSet, ...], Found]]:
    """Return (cost, partition, its choice) of at most `keep` partitions, best first.

    Partitions are searched by rising bound, until a bound is above the worst cost that is kept.
    Ties are broken by fewer pools, then by a fixed order.
    bounds: (lower bound of the cost, partition).
    best_of: (partition, limit) -> its exact best choice, or None if that costs more than the limit.
    """
    best_so_far: list[tuple[float, tuple[ModelSet, ...], Found]] = []
    for bound, blocks in sorted(bounds):
        worst = best_so_far[keep - 1][0] if len(best_so_far) >= keep else np.inf
        if bound > worst * SLACK:
            break
        best = best_of(blocks, worst)
        if best is not None:
            best_so_far.append((best[0], blocks, best[1]))
            best_so_far = sorted(best_so_far, key=lambda one: (one[0], len(one[1]), one[1]))[:keep]
    return best_so_far


def least_cost(options: Sequence[Options], size: int) -> float:
    """Return a lower bound of the cost of a partition; inf if the smallest sizes do not fit.

    Each pool gets all devices except the others' smallest sizes, and takes for each stage its
    fastest option on them. The slowest pool of each stage counts, and stages add up.
    """
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
    """Return (cost, index of each pool's option) of the cheapest choice on at most `size` devices.

    None if no choice costs at most `worst`. A beam search first finds a cost to prune the exact
    search with.
    """
    floors = [int(one.sizes.min()) for one in options]
    if sum(floors) > size:
        return None
    order = sorted(range(len(options)), key=lambda number: (len(options[number]), number))
    ordered = [options[number] for number in order]
    bounds = _bounds_by_remaining(ordered, size)
    known = _combine_pools(ordered, size, bounds, worst, beam=_BEAM)
    worst = min(worst, known[0]) if known else worst
    exact = _combine_pools(ordered, size, bounds, worst, beam=None) or known
    if exact is None:
        return None
    cost, picks = exact
    return cost, tuple(picks[order.index(number)] for number in range(len(options)))


def possible_sizes(options: Sequence[Options], index: int, size: int, worst: float) -> Array:
    """Return the size of each option of pool `index` that could be in a choice of at most `worst`.

    The other pools each get all devices that are left, except the smallest sizes of the others. A
    size occurs as often as it has such options.
    """
    one = options[index]
    others = []
    for number, other in enumerate(options):
        if number != index:
            others.append(other)
    floors = sum(int(other.sizes.min()) for other in others)
    reach = one.costs
    for other in others:
        left = size - floors + int(other.sizes.min()) - one.sizes
        least = _least_by_size(other, size)[np.maximum(left, 0)]
        reach = np.maximum(reach, np.where((left >= 0)[:, None], least, np.inf))
    return one.sizes[reach.sum(axis=1) <= worst * SLACK]


def select_undominated(options: Options) -> tuple[Options, Array]:
    """Return (options, indices) of the options that no other dominates in size and all stages.

    Options with infinite seconds are dropped. Of equal options the first is kept.
    """
    points = np.column_stack([options.sizes.astype(np.float64), options.costs])
    points = np.where(np.isfinite(points), points, np.inf)
    finite = np.isfinite(points).all(axis=1)
    numbers = np.flatnonzero(finite)
    remaining = numbers[pareto(points[finite])]
    return Options(options.sizes[remaining], options.costs[remaining]), remaining


def pareto(points: Array) -> Array:
    """Return the indices of the rows of points (N, k) that no other row dominates, by rising sum.

    Smaller is better; of equal rows the first is kept. Rows are visited by their sum, as only a row
    with a smaller or equal sum can dominate another.
    """
    order = np.lexsort((*points.T[::-1], points.sum(axis=1)))
    columns = np.ascontiguousarray(points[order].T)
    indices = []
    while len(order):
        indices.append(int(order[0]))
        better = columns[0, 1:] < columns[0, 0]
        for column in columns[1:]:
            better |= column[1:] < column[0]
        columns = columns[:, 1:][:, better]
        order = order[1:][better]
    return np.array(indices, dtype=np.int64)


def select_unbeaten(points: Array, front: Array) -> Array:
    """Return the ascending indices of the rows of points (N, k) that no row of the front beats.

    A row of the front beats a point if it is <= everywhere and < somewhere, so equal points stay.
    """
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
    """Partial choices: devices used, maxima so far, index of the predecessor and last option."""

    used: Array
    costs: Array
    parent: Array
    pick: Array


def _combine_pools(
    options: Sequence[Options], size: int, bounds: list[Array], worst: float, beam: int | None
) -> tuple[float, list[int]] | None:
    """Return (cost, option of each pool) of the cheapest choice, adding one pool after another.

    None if no choice costs at most `worst` on at most `size` devices. Of equal costs the choice
    with fewer devices is taken. Dominated partial choices are dropped, and those that would exceed
    `worst` even with the bounds of the later pools.
    bounds: of `_bounds_by_remaining`.
    beam: keep only so many of the most promising partial choices; None: exact.
    """
    stages = options[0].costs.shape[1]
    zero = np.zeros(1, dtype=np.int64)
    fronts = [_Front(zero, np.zeros((1, stages)), zero, zero)]
    for number, one in enumerate(options):
        last = fronts[-1]
        used = (last.used[:, None] + one.sizes[None, :]).ravel()
        pairs = np.flatnonzero(used <= size - _floor_after(options, number))
        parent, pick = np.divmod(pairs, len(one))
        costs = np.maximum(last.costs[parent], one.costs[pick])
        reach = np.maximum(costs, bounds[number][size - used[pairs]]).sum(axis=1)
        alive = np.flatnonzero(reach <= worst * SLACK)
        if beam is not None and len(alive) > beam:
            alive = alive[np.argsort(reach[alive], kind="stable")[:beam]]
        elif number < len(options) - 1:
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


def _floor_after(options: Sequence[Options], index: int) -> int:
    return sum(int(one.sizes.min()) for one in options[index + 1 :])


def _bounds_by_remaining(options: Sequence[Options], size: int) -> list[Array]:
    """Return for each pool (size + 1, stages): least seconds of the later pools, by devices left.

    Each later pool gets all devices that are left, except the smallest sizes of the other later
    pools. inf where they do not fit.
    """
    by_size = [_least_by_size(one, size) for one in options]
    bounds = []
    for number in range(len(options)):
        bound = np.zeros_like(by_size[0])
        floors = _floor_after(options, number)
        for later in range(number + 1, len(options)):
            others = floors - int(options[later].sizes.min())
            shifted = np.full_like(bound, np.inf)
            shifted[others:] = by_size[later][: size + 1 - others]
            bound = np.maximum(bound, shifted)
        bounds.append(bound)
    return bounds


def _least_by_size(options: Options, size: int) -> Array:
    """Return (size + 1, stages): the least seconds of a pool with at most so many devices.

    Each stage on its own; inf where no option is small enough.
    """
    least = np.full((size + 1, options.costs.shape[1]), np.inf)
    inside = options.sizes <= size
    np.minimum.at(least, options.sizes[inside], options.costs[inside])
    return np.minimum.accumulate(least, axis=0)
