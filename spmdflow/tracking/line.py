"""JSON Lines on disk: append, read and cut back, safe against a kill at any moment.

A kill can only tear the last line. Readers skip what is no object with an integer `step`;
rewriting goes through a second file and a rename.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from spmdflow.errors import SpmdflowError

logger = logging.getLogger(__name__)


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one line for each record, in one write that is handed to the system at once."""
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    _guarded(path, lambda: _append(path, text.encode()))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without lines that are torn or no record; [] if there is no file."""
    if not path.exists():
        return []
    return [record for _, record in _records(path)]


def cut_back(path: Path, step: int) -> None:
    """Drop the records of steps after `step`, and lines that are torn or no record; atomic."""
    if not path.exists():
        return
    kept = b"".join(line for line, record in _records(path) if record["step"] <= step)
    if kept != path.read_bytes():
        _guarded(path, lambda: _replace(path, kept))


def set_aside(path: Path) -> None:
    """Rename a file that has content to the first free NAME.1.jsonl, NAME.2.jsonl, ..."""
    if not path.exists() or not path.stat().st_size:
        return
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    _guarded(path, partial(os.rename, path, aside))
    logger.warning("%s: the run starts from its first step; the old one is %s", path, aside.name)


def drop_torn_line(path: Path) -> None:
    """Cut off a last line without newline, so that the next one does not continue it."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        logger.warning("%s: dropped a torn last line of %d bytes", path, len(data) - whole)
        _guarded(path, lambda: os.truncate(path, whole))


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each good line, with its newline, and its record; warns of the others."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        record = _record_or_none(line)
        if record is not None:
            yield line, record
        else:
            logger.warning("%s:%d: left out, no whole record of a step", path, number)


def _record_or_none(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # torn JSON or torn UTF-8
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record and line.endswith(b"\n") else None


def _append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _guarded(path: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as err:
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        raise SpmdflowError(
            f"tracking: cannot write {path}: {err.strerror}; expected a writable folder with "
            f"space ({free} bytes are free); free some or set run.dir"
        ) from err
