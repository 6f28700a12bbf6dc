"""Cutting rows into shares: evenly, with groups whole, or balanced by weight. Integers only.

A share is a list of row positions, ascending. Every function gives exactly `parts` shares, of
which some may be empty, and each row is in exactly one. The result depends on the arguments
alone, so every rank derives the same shares.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from spmdflow.errors import RowError


def chunks(num_rows: int, parts: int) -> list[range]:
    """Even contiguous cut, larger chunks first (as numpy.array_split): 5 rows over 2 are 3, 2."""
    _check(num_rows, parts)
    base, extra = divmod(num_rows, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def grouped_chunks(groups: Sequence[int], parts: int) -> list[list[int]]:
    """As even as whole groups allow; groups[row] names the group of a row.

    Groups stay in the order of their first row. Each cut moves to the group boundary nearest to
    the even cut (the later of two); with one row a group this is `chunks`.
    """
    whole = _rows_of_groups(groups)
    ends = [0, *accumulate(len(rows) for rows in whole)]
    cuts = [_nearest(ends, chunk.stop) for chunk in chunks(len(groups), parts)]
    return [
        sorted(row for rows in whole[start:stop] for row in rows)
        for start, stop in zip([0, *cuts], cuts, strict=False)
    ]


def balanced_chunks(
    weights: Sequence[int], parts: int, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Shares of nearly equal total weight, groups whole (longest processing time first).

    Heaviest group first to the lightest share so far; ties go to the share with fewer rows, then
    to the earlier one. No share exceeds the mean by more than the heaviest group (Graham 1969).
    """
    _check(len(weights), parts)
    if groups is not None and len(groups) != len(weights):
        raise RowError(
            f"balance: got {len(groups)} groups for {len(weights)} rows, expected one a row; "
            f"give each row's group or none"
        )
    if min(weights, default=0) < 0:
        raise RowError(
            f"balance: got weight {min(weights)}, expected none below 0; give lengths in tokens"
        )
    whole = _rows_of_groups(range(len(weights)) if groups is None else groups)
    totals = [sum(weights[row] for row in rows) for rows in whole]
    shares: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, 0, part) for part in range(parts)]
    for place in sorted(range(len(whole)), key=lambda place: (-totals[place], place)):
        total, num_rows, part = lightest[0]
        shares[part] += whole[place]
        heapq.heapreplace(lightest, (total + totals[place], num_rows + len(whole[place]), part))
    return [sorted(share) for share in shares]


def _rows_of_groups(groups: Sequence[int]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        found.setdefault(group, []).append(row)
    return list(found.values())


def _nearest(ends: Sequence[int], target: int) -> int:
    """Index of the entry of ends nearest to target, the later one of two."""
    above = bisect_left(ends, target)
    if above and target - ends[above - 1] < ends[above] - target:
        return above - 1
    return above


def _check(num_rows: int, parts: int) -> None:
    if num_rows < 0 or parts < 1:
        raise RowError(
            f"chunks: got {num_rows} rows over {parts} parts, expected 0 or more rows over 1 or "
            f"more parts; check the batch and the layout's sizes"
        )
