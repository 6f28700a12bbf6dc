"""How many micro-batches a share of rows needs, and which rows go into each. Integers only.

The controller decides the number (the largest need among the ranks, because every rank of a dp
group must run equally many forwards); each engine then cuts its own rows into exactly that many
parts. A part of packed rows costs the sum of their tokens; a part of padded rows costs the number
of rows x the longest row.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

from spmdflow.errors import ConfigError


def num_micro_batches(
    lengths_per_share: Sequence[Sequence[int]],
    *,
    max_rows: int,
    max_tokens: int | None,
    packed: bool,
) -> int:
    """Return how many forward passes each share must make: the largest need of a share, at least 1.

    lengths_per_share: for each rank the lengths (prompt + response tokens) of its rows.
    Without max_tokens a share of n rows needs ceil(n / max_rows) passes. With max_tokens, max_rows
    is ignored: no pass may cost more than max_tokens, which is the sum of its lengths if `packed`,
    otherwise its number of rows x its longest row. If a single row is longer than max_tokens, its
    pass may cost as much as that row. ConfigError if a limit is below 1.
    """
    if max_rows < 1 or (max_tokens is not None and max_tokens < 1):
        raise ConfigError(
            f"micro-batches: got max_rows {max_rows} and max_tokens {max_tokens}; expected at "
            f"least 1; set engine.micro_batch_rows or micro_batch_tokens to at least 1"
        )
    if max_tokens is None:
        needs = []
        for lengths in lengths_per_share:
            needs.append(-(-len(lengths) // max_rows))
    elif packed:
        needs = []
        for lengths in lengths_per_share:
            needs.append(_least_parts(lengths, max_tokens))
    else:
        shares = []
        for lengths in lengths_per_share:
            shares.append((_longest_first(lengths), lengths))
        needs = []
        for order, lengths in shares:
            needs.append(len(_fill(order, lengths, max_tokens)))
    return max([1, *needs])


def cut(lengths: Sequence[int], parts: int, *, by_tokens: bool, packed: bool) -> list[list[int]]:
    """Cut rows into exactly `parts` micro-batches; return the ascending positions of each.

    Not by_tokens: contiguous, sizes differ by at most one row, larger parts first. by_tokens and
    packed: nearly equal sums of lengths (`balance`). by_tokens and padded: rows of similar length
    together, so that the largest number of rows x longest row is low. More parts never raise the
    largest cost. Parts that are not needed are empty and come last.
    """
    assert parts >= 1, parts
    if by_tokens and packed:
        return balance(lengths, parts)
    if by_tokens:
        chosen = _by_tokens(lengths, parts)
    else:
        chosen = _by_rows(len(lengths), parts)
    return chosen + [[] for _ in range(parts - len(chosen))]


def balance(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split rows into `parts` parts of nearly equal weight; return ascending positions of each.

    Takes the heaviest row first and gives it to the lightest part so far (longest processing time
    first). Ties go to the part with fewer rows, then to the earlier part. No part exceeds the mean
    by more than the heaviest row (Graham 1969), and more parts never raise the largest weight.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, 0, part) for part in range(parts)]
    for row in _longest_first(weights):
        total, num_rows, part = lightest[0]
        shares[part].append(row)
        heapq.heapreplace(lightest, (total + weights[row], num_rows + 1, part))
    return [sorted(share) for share in shares]


def _least_parts(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the fewest parts with which `balance` gives no part more than the budget; at least 1.

    The budget is max_tokens, or the longest row if that is longer. Found by bisection.
    """
    budget = max(max_tokens, *lengths, 0)

    def fits(parts: int) -> bool:
        return all(sum(lengths[row] for row in part) <= budget for part in balance(lengths, parts))

    least = max(1, -(-sum(lengths) // budget))
    return bisect_left(range(len(lengths)), True, lo=least, key=fits)


def _by_rows(num_rows: int, parts: int) -> list[list[int]]:
    """Cut positions 0 to num_rows - 1 into `parts` contiguous parts, larger parts first.

    Sizes differ by at most one row.
    """
    small, larger = divmod(num_rows, parts)
    starts = []
    for part in range(parts + 1):
        starts.append(part * small + min(part, larger))
    result = []
    for start, end in zip(starts, starts[1:], strict=False):
        result.append(list(range(start, end)))
    return result


def _by_tokens(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Cut padded rows into at most `parts` parts whose largest cost is as low as `_fill` allows.

    The cost of a part is its number of rows x its longest row. Bisects for the least budget, not
    below the longest row, with which `_fill` needs at most `parts` parts. Returns ascending
    positions of each part, the part with the longest rows first.
    """
    order = _longest_first(lengths)
    low = 0
    high = max(1, *lengths, 1) * len(lengths)
    while high - low > 1:
        budget = (low + high) // 2
        fits = len(_fill(order, lengths, budget)) <= parts and budget >= lengths[order[0]]
        low, high = (low, budget) if fits else (budget, high)
    return [sorted(part) for part in _fill(order, lengths, high)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _fill(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut padded rows into parts, each with number of rows x longest row at most `budget`.

    order: positions, longest row first. Greedy: the first row of a part, its longest, sets the
    number of rows: budget // its length, at least 1. So a row longer than the budget is alone.
    """
    parts = []
    start = 0
    while start < len(order):
        size = max(1, budget // max(1, lengths[order[start]]))
        parts.append(list(order[start : start + size]))
        start += size
    return parts
