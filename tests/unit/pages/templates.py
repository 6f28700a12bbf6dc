"""The table of chat templates in docs/EPISODES.md, from conversations with each of them.

.venv/bin/python -m tests.unit.pages.templates     # writes the table anew, and leaves the text
"""

from __future__ import annotations

from pathlib import Path

from tests.unit.episodes.conformance import FAMILIES, Family, outcome
from tests.unit.pages.table import replace_table, row

PAGE = Path(__file__).parents[3] / "docs" / "EPISODES.md"
_COLUMNS = (
    "model",
    "template",
    "3 user turns",
    "20 tool calls",
    "a user turn behind them",
    "thoughts",
)


def row_of(family: Family) -> str:
    """What a template does, as a row of the table."""
    source = {"mistral": "mistral-common", "smollm2": "the model"}
    where = source.get(family.source, f"TRL, {family.source}")
    cells = [family.label, where, *outcome(family)]
    return row(cells)


def written_page(text: str) -> str:
    """The page with the table below "### Chat templates" replaced."""
    return replace_table(text, "### Chat templates", _COLUMNS, list(map(row_of, FAMILIES)))


if __name__ == "__main__":
    PAGE.write_text(written_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
