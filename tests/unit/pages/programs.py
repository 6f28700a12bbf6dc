"""The table of programs in docs/EPISODES.md, from the table that the slow test runs.

.venv/bin/python -m tests.unit.pages.programs     # writes the table anew, and leaves the text
"""

from __future__ import annotations

from pathlib import Path

from tests.programs.table import PROGRAMS, Program
from tests.unit.pages.table import replace_table, row

PAGE = Path(__file__).parents[3] / "docs" / "EPISODES.md"
_PINS = Path(__file__).parents[2] / "programs" / "requirements"
_COLUMNS = (
    "program",
    "what runs with its defaults",
    "replies, segments",
    "set for it",
    "besides",
)


def row_of(program: Program) -> str:
    """A program as a row of the table."""
    pins = (_PINS / f"{program.environment}.txt").read_text(encoding="utf-8")
    package, _, version = pins.splitlines()[0].partition("==")
    package = package.partition("[")[0]
    num_replies = sum(len(segment) for segment in program.segments)
    settings = [f"`{name}`" for name in (*program.variables, *program.settings)]
    cells = [
        f"{package} {version}",
        program.runs,
        f"{num_replies}, {len(program.segments)}",
        ", ".join(settings) or "-",
        program.needs or "-",
    ]
    return row(cells)


def written_page(text: str) -> str:
    """The page with the table below "### Programs" replaced."""
    return replace_table(text, "### Programs", _COLUMNS, list(map(row_of, PROGRAMS)))


if __name__ == "__main__":
    PAGE.write_text(written_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
