"""`merge`: metrics of many ranks and calls become one number for each name. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import fsum
from typing import Any

from spmdflow.errors import ProtocolError
from spmdflow.transfer.worker import Max, Mean, Metric, Sum


def merge(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """One float for each name, names in the order in which they first occur.

    Mean: sum of totals / sum of weights (left out where the weights sum to 0: nothing was
    measured). Sum: added. Max: the largest, nan if one is nan. A plain number: the mean of
    them, exactly the number if all are equal. The order of the mappings changes no value.
    ProtocolError if a name comes as two kinds.
    """
    gathered: dict[str, list[Metric]] = {}
    for mapping in metrics:
        for name, value in mapping.items():
            gathered.setdefault(name, []).append(value)
    merged = {name: _merged(name, values) for name, values in gathered.items()}
    return {name: value for name, value in merged.items() if value is not None}


def _merged(name: str, values: list[Metric]) -> float | None:
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise ProtocolError(
            f"metric {name!r}: reported as {names}, expected one kind; "
            f"report it alike in every call, or under two names"
        )
    return _MERGERS[kinds.pop()](values)


def _kind(value: Metric) -> type:
    return type(value) if isinstance(value, Mean | Sum | Max) else float


def _mean(values: list[Mean]) -> float | None:
    weight = fsum(value.weight for value in values)
    return _sum_of([value.total for value in values]) / weight if weight else None


def _sum(values: list[Sum]) -> float:
    return _sum_of([value.total for value in values])


def _max(values: list[Max]) -> float:
    numbers = [float(value.value) for value in values]
    return max(numbers) if all(number == number for number in numbers) else float("nan")


def _plain(values: list[float]) -> float:
    if min(values) == max(values):  # fsum / n may differ from n equal numbers in the last bit
        return float(values[0])
    return _sum_of(values) / len(values)


def _sum_of(numbers: list[float]) -> float:
    """Exactly rounded, so independent of order; inf and nan as in ordinary addition."""
    try:
        return fsum(numbers)
    except (OverflowError, ValueError):  # a sum beyond float, or inf - inf
        return sum(map(float, numbers))


# Any: each takes a list of the kind it stands beside
_MERGERS: dict[type, Callable[[list[Any]], float | None]] = {
    Mean: _mean,
    Sum: _sum,
    Max: _max,
    float: _plain,
}
