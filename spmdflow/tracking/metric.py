"""`merge`: combines the metrics of many ranks and calls into one number for each name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import fsum
from typing import Any

from spmdflow.errors import ProtocolError
from spmdflow.worker_api.metric import Max, Mean, Metric, Min, Sum


def merge(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """Return one float for each name, names in the order in which they first occur.

    Mean: sum of totals / sum of weights (omitted if the weights sum to 0, as nothing was measured).
    Sum: added. Max and Min: the largest and the smallest, nan if one is nan. Plain numbers: their
    mean, exact if all are equal. The order of the mappings does not change a value. ProtocolError
    if a name is reported as two of these kinds.
    """
    gathered: dict[str, list[Metric]] = {}
    for mapping in metrics:
        for name, value in mapping.items():
            gathered.setdefault(name, []).append(value)
    result = {}
    for name, values in gathered.items():
        number = _merge_values(name, values)
        if number is not None:
            result[name] = number
    return result


def _merge_values(name: str, values: list[Any]) -> float | None:
    """Return one number from all values of one metric, by the rules of `merge`.

    None if the weights of a Mean sum to 0. ProtocolError if the values are of several kinds.
    """
    kinds = set()
    for v in values:
        kinds.add(type(v) if isinstance(v, Mean | Sum | Max | Min) else float)
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise ProtocolError(
            f"metric {name!r}: reported as {names}, expected one kind; "
            f"report it alike in every call, or under two names"
        )
    (kind,) = kinds
    if kind is Mean:
        weight = fsum(value.weight for value in values)
        if weight:
            return _sum_of([value.total for value in values]) / weight
        return None
    if kind is Sum:
        return _sum_of([value.total for value in values])
    if kind in (Max, Min):
        numbers = [float(value.value) for value in values]
        reduced = max(numbers) if kind is Max else min(numbers)
        if all(number == number for number in numbers):
            return reduced
        return float("nan")
    if min(values) == max(values):  # fsum / n may differ from n equal numbers in the last bit
        return float(values[0])
    return _sum_of(values) / len(values)


def _sum_of(numbers: list[float]) -> float:
    """The sum, rounded once and so independent of order; inf and nan as in ordinary addition."""
    try:
        return fsum(numbers)
    except (OverflowError, ValueError):  # a sum beyond float, or inf - inf
        return sum(map(float, numbers))
