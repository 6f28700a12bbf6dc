"""A curve as text: 60 x 12 characters that survive any log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

Point = tuple[float, float]


def text_curve(
    title: str, points: Sequence[Point], *, width: int = 60, height: int = 12
) -> list[str]:
    """Lines of a plot of (x, y) points in rising x; points that are not finite are left out.

    The curve is drawn by linear interpolation, `o` at measured points, `.` between them (only
    `*`, the mean of a column, where there are more points than columns).
    """
    points = [(float(x), float(y)) for x, y in points if isfinite(x) and isfinite(y)]
    if not points:
        return [f"{title}: no finite value"]
    first, last = points[0][0], points[-1][0]
    low, high = _limits([y for _, y in points])
    grid = [[" "] * width for _ in range(height)]
    for column, y, mark in _columns(points, width):
        grid[round((high - y) / (high - low) * (height - 1))][column] = mark
    labels = [f"{high - (high - low) * row / (height - 1):.4g}" for row in range(height)]
    margin = max(map(len, labels))
    lines = [
        f"{label if row % 3 == 0 or row == height - 1 else '':>{margin}} |{''.join(marks)}".rstrip()
        for row, (label, marks) in enumerate(zip(labels, grid, strict=True))
    ]
    ends = f"{first:g}{f'step {last:g}':>{width - len(f'{first:g}')}}"
    return [title, *lines, f"{'':>{margin}} +{'-' * width}", f"{'':>{margin}}  {ends}"]


def _limits(values: Sequence[float]) -> Point:
    """Lowest and highest y of the plot; a flat curve gets room above and below."""
    low, high = min(values), max(values)
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low, high


def _columns(points: Sequence[Point], width: int) -> list[tuple[int, float, str]]:
    """(column, y, mark) of everything that is drawn, measured points last."""
    span = points[-1][0] - points[0][0]
    measured: dict[int, list[float]] = {}
    for x, y in points:
        column = round((x - points[0][0]) / span * (width - 1)) if span else 0
        measured.setdefault(column, []).append(y)
    mark = "*" if len(points) > width else "o"
    means = [(column, sum(ys) / len(ys), mark) for column, ys in measured.items()]
    between = []
    for (left, y_left, _), (right, y_right, _) in zip(means, means[1:], strict=False):
        for column in range(left + 1, right):
            y = y_left + (y_right - y_left) * (column - left) / (right - left)
            between.append((column, y, "."))
    return between + means
