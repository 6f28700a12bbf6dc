"""docs/REFUSALS.md, row by row: what stands on the left is done, what stands on the right is said.

A message must name what the table of `refusals.py` says, and have our three parts: got, expected,
do. Its words are free; the page is written by `refusals.py` and follows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.pages.refusals import (
    PARTS,
    SITUATIONS,
    WAYS,
    folder_of_mistakes,
    message_of,
    rows_of_page,
)
from tests.unit.refusals import missing_parts

NUM_ROWS_AT_LEAST = 25
ROWS = list(rows_of_page())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> Iterator[None]:
    with folder_of_mistakes(tmp_path):
        yield


@pytest.mark.parametrize(("section", "done", "said"), ROWS, ids=[f"{s}: {d}" for s, d, _ in ROWS])
def test_what_the_page_names_is_refused_with_its_value_and_a_remedy(
    section: str, done: str, said: str
) -> None:
    message = message_of(section, done)

    first = message.splitlines()[0]
    assert missing_parts(message, PARTS[section][done]) == [], message
    assert re.search(
        r"\bexpected\b|unknown key|no column|registered methods are|not started by", first
    ), first
    assert message == said, "write the page anew: .venv/bin/python -m tests.unit.pages.refusals"


def test_page_has_many_rows_in_every_section_and_none_twice() -> None:
    rows = [(section, done) for section, done, _ in ROWS]

    assert len(rows) >= NUM_ROWS_AT_LEAST
    assert len(set(rows)) == len(rows)
    assert set(rows) == {(section, done) for section in PARTS for done in PARTS[section]}
    assert set(PARTS) == set(WAYS)
    assert set(PARTS["RUN_DIR and checkpoints"]) == set(SITUATIONS)
