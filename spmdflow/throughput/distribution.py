"""Medians, quartiles and percentiles of numbers and of counted lengths. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Quartiles:
    """How some numbers are spread; quartiles are interpolated linearly."""

    count: int
    mean: float
    median: float
    lower_quartile: float
    upper_quartile: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Quartiles | None:
        """Of these numbers, in any order; None if there are none."""
        if not numbers:
            return None
        ordered = sorted(numbers)
        return cls(
            count=len(ordered),
            mean=math.fsum(ordered) / len(ordered),
            median=quantile(ordered, 0.5),
            lower_quartile=quantile(ordered, 0.25),
            upper_quartile=quantile(ordered, 0.75),
            least=ordered[0],
            most=ordered[-1],
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the number at a share (0 to 1) of ascending numbers, interpolated linearly.

    The same as numpy.quantile with its default method.
    """
    position = share * (len(ordered) - 1)
    lower = math.floor(position)
    upper = math.ceil(position)
    return ordered[lower] + (position - lower) * (ordered[upper] - ordered[lower])


@dataclass(frozen=True)
class Lengths:
    """How the lengths of rows are distributed; percentiles are lengths that occur."""

    rows: int
    mean: float
    p50: int
    p90: int
    p99: int
    most: int

    @classmethod
    def of(cls, counted: Iterable[Sequence[int]]) -> Lengths | None:
        """Of [length, number of rows] pairs; None if there are no rows.

        A percentile is the least length that so many rows do not exceed (nearest rank).
        """
        counts: Counter[int] = Counter()
        for length, rows in counted:
            counts[length] += rows
        total = counts.total()
        if not total:
            return None
        tokens = sum(length * rows for length, rows in counts.items())
        return cls(
            rows=total,
            mean=tokens / total,
            p50=_nearest_rank(counts, 50),
            p90=_nearest_rank(counts, 90),
            p99=_nearest_rank(counts, 99),
            most=max(counts),
        )


def _nearest_rank(counts: Counter[int], percent: int) -> int:
    """Return the least length that at least `percent` % of the rows do not exceed."""
    needed = percent * counts.total()
    seen = 0
    for length in sorted(counts):
        seen += counts[length]
        if 100 * seen >= needed:
            return length
    raise AssertionError(counts)
