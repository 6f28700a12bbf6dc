"""Shapes of text: columns side by side, hanging paragraphs, ranks, bytes and seconds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 100
_MOST_LINES = 24
_ROUNDED_UP = 0.9995
"""From here on three digits read 1."""


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Columns side by side, the first row their heads; the last column is cut at the width."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for number, row in enumerate(rows):
        if number > _MOST_LINES and number < len(rows) - 1:
            if number == _MOST_LINES + 1:
                yield f"  ... {len(rows) - _MOST_LINES - 2} more"
            continue
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = ("  " + "  ".join(cells)).rstrip()
        yield line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def wrapped(head: str, text: str, *, colon: str = ":") -> Iterator[str]:
    """A paragraph that hangs below its head."""
    yield from textwrap.wrap(
        f"{head}{colon} {text}".rstrip(), WIDTH, subsequent_indent="      ", break_on_hyphens=False
    )


def spans(ranks: Sequence[int]) -> str:
    """Ascending ranks as ranges: [0, 1, 2, 5] -> "0-2, 5"; of many only the first and last."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    parts = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in found]
    if len(parts) > 4:
        parts = [*parts[:2], f"... {parts[-1]} ({len(ranks)} ranks)"]
    return ", ".join(parts)


def bytes_of(size: float) -> str:
    """1234567 -> 1.23 MB; the unit is that of the rounded number: 999999 -> 1 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= _ROUNDED_UP * factor:
            return f"{_three_digits(size / factor)} {unit}"
    return f"{size:.0f} B"


def seconds_of(value: float) -> str:
    """0.0123 -> 12.3 ms."""
    if value < _ROUNDED_UP * 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{_three_digits(value * 1e3)} ms" if value < _ROUNDED_UP else f"{value:.4g} s"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
