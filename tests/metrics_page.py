"""The names on docs/METRICS.md, for tests that see metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "METRICS.md"
_ANY = "[^/]+"


def unknown_metrics(names: Iterable[str], *, exactly: bool = False) -> list[str]:
    """Those that the page does not have; exactly: `<...>` on the page stands for nothing."""
    known = [re.compile(pattern) for pattern in _patterns() if not exactly or _ANY not in pattern]
    return sorted(name for name in names if not any(each.fullmatch(name) for each in known))


@cache
def _patterns() -> list[str]:
    """Of every name in the first cell of a table's row, and in the second of the first table."""
    cells = re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), re.M)
    names = re.findall(r"`([^`]+)`", " ".join(cells))
    return [re.sub(r"<[a-z]+>", _ANY, re.escape(name)) for name in names]
