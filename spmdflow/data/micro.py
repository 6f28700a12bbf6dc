"""How many micro-batches a share of rows needs, and which rows go into each. Integers only.

The controller decides the number (the largest need among the ranks, because every rank of a dp
group must run equally many forwards); each engine then cuts its own rows into exactly that many
parts. A part is padded to its longest row, so its cost in tokens is rows x longest row.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmdflow.errors import ConfigError


def num_micro_batches(
    lengths_per_share: Sequence[Sequence[int]], *, max_rows: int, max_tokens: int | None
) -> int:
    """Forward passes that every share must make: the largest need among shares, at least 1.

    lengths_per_share: for each rank the lengths (prompt + response tokens) of its rows.
    max_tokens, if given, bounds rows x longest row of a part and replaces max_rows; where a row
    alone exceeds it, parts may cost what that row costs. ConfigError if a limit is below 1.
    """
    if max_rows < 1 or (max_tokens is not None and max_tokens < 1):
        raise ConfigError(
            f"micro-batches: got max_rows {max_rows} and max_tokens {max_tokens}; expected at "
            f"least 1; set engine.micro_batch to at least 1 row or token"
        )
    if max_tokens is None:
        needs = [-(-len(lengths) // max_rows) for lengths in lengths_per_share]
    else:
        shares = [(_longest_first(lengths), lengths) for lengths in lengths_per_share]
        needs = [len(_fill(order, lengths, max_tokens)) for order, lengths in shares]
    return max([1, *needs])


def cut(lengths: Sequence[int], parts: int, *, by_tokens: bool) -> list[list[int]]:
    """Positions of the rows of each of exactly `parts` parts; trailing parts may be empty.

    By rows: contiguous, sizes differ by at most one, larger parts first. By tokens: rows of
    similar length together such that the costliest part (rows x longest row) is as cheap as can
    be; never dearer than with fewer parts. Positions ascend inside a part.
    """
    assert parts >= 1, parts
    chosen = _by_tokens(lengths, parts) if by_tokens else _by_rows(len(lengths), parts)
    return chosen + [[] for _ in range(parts - len(chosen))]


def _by_rows(num_rows: int, parts: int) -> list[list[int]]:
    small, larger = divmod(num_rows, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return [list(range(start, end)) for start, end in zip(starts, starts[1:], strict=False)]


def _by_tokens(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """The least budget under which `parts` parts suffice, found by bisection, and its parts."""
    order = _longest_first(lengths)
    low, high = 0, max(1, *lengths, 1) * len(lengths)
    while high - low > 1:
        budget = (low + high) // 2
        fits = len(_fill(order, lengths, budget)) <= parts and budget >= lengths[order[0]]
        low, high = (low, budget) if fits else (budget, high)
    return [sorted(part) for part in _fill(order, lengths, high)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _fill(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Fewest parts within budget: take rows longest first; the first row sets a part's width."""
    parts, start = [], 0
    while start < len(order):
        size = max(1, budget // max(1, lengths[order[start]]))
        parts.append(list(order[start : start + size]))
        start += size
    return parts
