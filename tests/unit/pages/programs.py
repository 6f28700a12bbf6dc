"""The table of programs in docs/EPISODES.md, from the table that the slow test runs.

.venv/bin/python -m tests.unit.pages.programs     # writes the table anew, and leaves the text
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.programs.table import PROGRAMS, Program

PAGE = Path(__file__).parents[3] / "docs" / "EPISODES.md"
_PINS = Path(__file__).parents[2] / "programs" / "requirements"
_HEAD = (
    "| program | what runs with its defaults | replies, segments | set for it | besides |",
    "|---|---|---|---|---|",
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
    return f"| {' | '.join(cells)} |"


def written_page(text: str) -> str:
    """The page with the table below "### Programs" replaced."""
    table = "\n".join([*_HEAD, *map(row_of, PROGRAMS)]) + "\n"
    text, count = re.subn(
        r"(### Programs\n\n)(?:\|[^\n]*\n)*",
        lambda match: match[1] + table,
        text,
    )
    assert count == 1
    return text


if __name__ == "__main__":
    PAGE.write_text(written_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
