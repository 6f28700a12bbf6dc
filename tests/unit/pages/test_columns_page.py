"""docs/COLUMNS.md lists the columns that public workers and map functions read and write."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import spmdflow
from spmdflow.worker_api.register import map_spec, registered_methods
from spmdflow.worker_api.worker import Worker

_PAGE = (Path(__file__).parents[3] / "docs" / "COLUMNS.md").read_text(encoding="utf-8")
_OF_DATA = {"responses", "prompt_text", "row", "chosen_tokens", "answers", "desirable"}
"""Written when a row of data is read, by no method."""


def _columns() -> set[str]:
    """Of every registered method and map function among the public names."""
    return {column for spec in _specs() for column in spec} | _OF_DATA


def _specs() -> Iterator[tuple[str, ...]]:
    for name in spmdflow.__all__:
        thing = getattr(spmdflow, name)
        if inspect.isclass(thing) and issubclass(thing, Worker):
            for spec in registered_methods(thing).values():
                yield (*spec.reads, *spec.optional, *spec.writes)
        elif hasattr(thing, "_spmdflow_map_function"):
            spec = map_spec(thing)
            yield (*spec.reads, *spec.optional, *spec.writes)


def test_every_column_that_is_read_or_written_is_explained() -> None:
    assert sorted(name for name in _columns() if f"`{name}`" not in _PAGE) == []


def test_no_column_is_explained_that_nothing_uses() -> None:
    cells = [line.split("|")[1] for line in _PAGE.splitlines() if line.startswith("| `")]
    explained = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}

    assert sorted(explained - _columns()) == []
