"""The table of chat templates in docs/EPISODES.md, from conversations with each of them.

.venv/bin/python -m tests.unit.pages.templates     # writes the table anew, and leaves the text
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.episodes.conformance import FAMILIES, Family, outcome

PAGE = Path(__file__).parents[3] / "docs" / "EPISODES.md"
_HEAD = (
    "| model | template | 3 user turns | 20 tool calls | a user turn behind them | thoughts |",
    "|---|---|---|---|---|---|",
)


def row_of(family: Family) -> str:
    """What a template does, as a row of the table."""
    source = {"mistral": "mistral-common", "smollm2": "the model"}
    where = source.get(family.source, f"TRL, {family.source}")
    cells = [family.label, where, *outcome(family)]
    return f"| {' | '.join(cells)} |"


def written_page(text: str) -> str:
    """The page with the table below "### Chat templates" replaced."""
    table = "\n".join([*_HEAD, *map(row_of, FAMILIES)]) + "\n"
    text, count = re.subn(
        r"(### Chat templates\n\n)(?:\|[^\n]*\n)*",
        lambda match: match[1] + table,
        text,
    )
    assert count == 1
    return text


if __name__ == "__main__":
    PAGE.write_text(written_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
