"""The tables of docs/COMING_FROM.md, from the names that an unknown key is compared with.

.venv/bin/python -m tests.unit.pages.coming_from     # writes the tables anew, and leaves the text
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from spmdflow.config.foreign_names import OPENRLHF, TRL, VERL, ForeignName

PAGE = Path(__file__).parents[3] / "docs" / "COMING_FROM.md"
LIBRARIES = {"TRL": TRL, "verl": VERL, "OpenRLHF": OPENRLHF}
_HEAD = ("| there | here | note |", "|---|---|---|")


def table_of(names: Sequence[ForeignName]) -> str:
    """One row for each setting of a library."""
    rows = list(_HEAD)
    for name in names:
        settings = ", ".join(f"`{setting}`" for setting in name.settings)
        rows.append(f"| `{name.name}` | {settings} | {name.remark} |")
    return "\n".join(rows) + "\n"


def written_page(text: str) -> str:
    """The page with the table below each library's "### Settings of NAME" replaced."""
    for library, names in LIBRARIES.items():
        heading = re.escape(f"### Settings of {library}\n\n")
        pattern = rf"({heading})(?:\|[^\n]*\n)*"
        table = table_of(names).replace("\\", r"\\")
        text, count = re.subn(pattern, rf"\g<1>{table}", text)
        assert count == 1, library
    return text


if __name__ == "__main__":
    PAGE.write_text(written_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
