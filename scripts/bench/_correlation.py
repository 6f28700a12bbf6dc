"""How well predicted seconds order measured ones: ranks, Spearman, its ceiling, the choice's loss.

Pure functions on lists. Constant values have no order: their correlation is nan.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

Repeats = Sequence[Sequence[float]]
"""Seconds of every run of every configuration; all were run as often."""


@dataclass(frozen=True)
class Choice:
    """The configuration with the least predicted seconds, among the measured ones."""

    index: int
    rank: int
    """1: the fastest of all."""
    loss: float
    """Part by which it is slower than the fastest; 0.05 is 5 %."""


def ranks(values: Sequence[float]) -> list[float]:
    """Places from 1, the smallest first; equal values share the mean of their places."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    found = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for index in order[first : last + 1]:
            found[index] = (first + last) / 2 + 1
        first = last + 1
    return found


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's correlation of the ranks (Spearman 1904), -1 to 1; nan if either is constant.

    ValueError if the two differ in length or have fewer than two values.
    """
    if len(one) != len(other) or len(one) < 2:
        raise ValueError(
            f"spearman: got {len(one)} and {len(other)} values, expected as many of each and at "
            f"least 2; measure more configurations"
        )
    left = ranks(one)
    right = ranks(other)
    if len(set(left)) == 1 or len(set(right)) == 1:
        return math.nan
    return statistics.correlation(left, right)


def split_half(repeats: Repeats) -> float:
    """Spearman between the means of two halves of the repeats: what noise leaves to be had.

    The mean over all ways to halve them; of an odd number one half has one more. No
    Spearman-Brown correction. ValueError below two repeats or if they are not equally many.
    """
    counts = {len(runs) for runs in repeats}
    if len(counts) != 1 or min(counts) < 2:
        raise ValueError(
            f"split_half: got {sorted(counts)} repeats, expected one number of at least 2 for all "
            f"configurations; finish the measurement or raise --repeats"
        )
    count = counts.pop()
    halves = [
        half
        for half in combinations(range(count), count // 2)
        if count % 2 or 0 in half  # an even number: a half and its complement are one way
    ]
    return statistics.mean(
        spearman(
            [statistics.mean(runs[i] for i in half) for runs in repeats],
            [statistics.mean(runs[i] for i in range(count) if i not in half) for runs in repeats],
        )
        for half in halves
    )


def chosen(predicted: Sequence[float], measured: Sequence[float]) -> Choice:
    """The plan that the prediction chooses; of equal ones the first, as a search would."""
    index = min(range(len(predicted)), key=lambda place: predicted[place])
    rank = 1 + sum(seconds < measured[index] for seconds in measured)
    return Choice(index, rank, measured[index] / min(measured) - 1)
