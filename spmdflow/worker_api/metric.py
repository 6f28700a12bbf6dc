"""The kinds of metric that a worker or a map function reports.

The kind says how the values of several ranks and calls become one number
(`tracking.metric.merge`). A plain number is averaged.
"""

from __future__ import annotations

from typing import NamedTuple


class Mean(NamedTuple):
    """A metric that is total / weight, summed over ranks and calls before dividing."""

    total: float
    weight: float


class Sum(NamedTuple):
    """A metric that adds up over ranks and calls."""

    total: float


class Max(NamedTuple):
    """A metric reduced to its largest value over ranks and calls."""

    value: float


class Min(NamedTuple):
    """A metric reduced to its smallest value over ranks and calls."""

    value: float


Metric = float | Mean | Sum | Max | Min
