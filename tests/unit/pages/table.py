"""Tables that programs write into pages, below a heading."""

from __future__ import annotations

import re
from collections.abc import Sequence


def row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def replace_table(text: str, heading: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    """A page with the table directly below a heading replaced; the heading must occur once."""
    table = "\n".join([row(columns), "|---" * len(columns) + "|", *rows]) + "\n"
    text, count = re.subn(
        rf"({re.escape(heading)}\n\n)(?:\|[^\n]*\n)*",
        lambda match: match[1] + table,
        text,
    )
    assert count == 1, (heading, count)
    return text
