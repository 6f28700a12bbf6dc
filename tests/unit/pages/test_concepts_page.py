"""docs/CONCEPTS.md: every word has one row, and the file that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (ROOT / "docs" / "CONCEPTS.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| word")
]


def test_every_file_of_a_word_exists() -> None:
    paths = [path for row in ROWS for path in re.findall(r"`([^`]+)`", row[3])]

    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / "spmdflow" / path).exists()] == []


def test_every_word_is_defined_once() -> None:
    words = [word.strip(" `") for row in ROWS for word in row[0].split(",")]

    assert len(words) == len(set(words))
    assert all(row[1].endswith((".", ")")) for row in ROWS), [
        r for r in ROWS if r[1][-1] not in ".)"
    ]
