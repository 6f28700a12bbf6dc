"""What went wrong, on which rank first, and how it is reported to the user and in RUN_DIR.

Failures arrive in any order: when a rank dies its peers fail too, often sooner. They are collected
for a second. The cause is then a death if there is one, else a stopped process, else what a rank
reported itself; within a kind, the first to arrive.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spmdflow.errors import RunFailed, SpmdflowError

logger = logging.getLogger(__name__)

_MOST_OTHERS = 3
_MOST_LETTERS = 160
SHOW_SECONDS = 20.0
"""For the page of a failed run: torchrun kills its ranks 30 s after the first one ended."""
GATHER_SECONDS = 1.0
"""How long failures are gathered before the first cause is named."""

UNWIND_SECONDS = 10.0
"""How long ranks that are alive get to leave a failed session."""

_ORDER = {"death": 0, "stopped": 1}
"""Kinds that explain the others; all other kinds come after them."""
KINDS_OF_THE_LIVING = ("exception", "script", "controller")
"""Kinds after which every process of the run may be alive and well."""


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong on one rank."""

    kind: str
    """death, stopped, deadline, exception, script, controller, launcher, interrupt or start."""
    rank: int
    cause: str
    """One sentence."""
    label: str = ""
    """What the rank was running: "role.method", or empty."""
    number: int | None = None
    """Number of that call or transfer."""
    lane: str | None = None
    """compute, transfer, or None outside the lanes."""
    traceback: str = ""
    own_traceback: str = ""
    """The part of it in the user's code."""
    line: str = ""
    """The script's line that made the call: "file:line: text"."""
    where: str = ""
    """Where the rank's Python was: "file:line in function: text"; of one that has finished the call
    (it left out a collective), where the others wait."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970 on the node that noticed it."""

    def sentence(self) -> str:
        """Rank, what it was running and the cause."""
        if self.label:
            place = f", {self.label} (call {self.number}, {self.lane} lane)"
        else:
            place = ""
        return f"rank {self.rank}{place}: {self.cause}"


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others; failures in order of arrival, at least one."""

    def weight(index: int) -> tuple[int, int]:
        failure = failures[index]
        spoke = any(
            earlier.rank == failure.rank and earlier.kind not in _ORDER
            for earlier in failures[:index]
        )
        # a rank that reported a failure and then left did not die of something else
        return (2 if spoke else _ORDER.get(failure.kind, 2), index)

    return failures[min(range(len(failures)), key=weight)]


def as_record(cause: Failure, others: Iterable[Failure]) -> dict[str, Any]:
    """The content of failure.json."""
    return _facts(cause) | {"others": [_facts(other) for other in others if other is not cause]}


def run_failed(cause: Failure) -> RunFailed:
    """The error that a failed session raises; the failed rank's traceback is added as a note."""
    error = RunFailed(f"run failed: {cause.sentence()}", as_record(cause, ()))
    if cause.traceback:
        error.add_note(f"on rank {cause.rank}:\n{cause.traceback}")
    return error


def write_failure(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON; a full disk or a missing folder is logged, never raised."""
    try:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as err:
        logger.error("cannot write %s: %s", path, err)
        with contextlib.suppress(OSError):
            path.unlink()  # a full disk leaves an empty file


def report(cause: Failure, others: Sequence[Failure], path: Path | None) -> None:
    """Tell the user on stderr, as one block: the cause, the lines of their code, where more is.

    path: of failure.json; None if it was not written, as RUN_DIR is not this run's.
    """
    lines = ["", "=" * 88, f"RUN FAILED: {cause.sentence()}"]
    lines += [f"called at {cause.line}"] if cause.line else []
    lines += [f"its Python was at {cause.where}"] if cause.where not in cause.cause else []
    lines += cause.own_traceback.rstrip().splitlines()
    ranks: dict[str, list[int]] = {}
    for other in others:
        if other is not cause:
            ranks.setdefault(other.cause.partition("\n")[0], []).append(other.rank)
    for text, failed in list(ranks.items())[:_MOST_OTHERS]:
        known = text == cause.cause.partition("\n")[0]
        shown = "the same" if known else textwrap.shorten(text, _MOST_LETTERS)
        lines.append(f"also on rank {', '.join(map(str, sorted(failed)))}: {shown}")
    if path is not None:
        lines.append(f"whole tracebacks: {path}; stacks: {path.parent / 'stacks-rank*.txt'}")
    lines += ["=" * 88, ""]
    with contextlib.suppress(OSError, ValueError):  # the launcher may have taken stderr along
        sys.stderr.write("\n".join(lines))
        sys.stderr.flush()


def call_within(seconds: float, function: Callable[[], object]) -> None:
    """Call function in a thread, and wait for it so long at most."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def _facts(failure: Failure) -> dict[str, Any]:
    """A failure as plain data, role and method apart, time readable."""
    facts = asdict(failure)
    role, _, method = facts.pop("label").rpartition(".")
    facts["call"] = facts.pop("number")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(facts.pop("time")))
    return {"rank": facts["rank"], "role": role, "method": method} | facts | {"time": stamp}


_WHILE = "while "


@contextlib.contextmanager
def noting(doing: str) -> Iterator[None]:
    """An error of ours that leaves the context is told as one that happened while `doing`."""
    try:
        yield
    except SpmdflowError as err:
        err.add_note(_WHILE + doing)
        raise


def what_was_done(err: BaseException) -> list[str]:
    """What `noting` noted of an error, innermost first."""
    result = []
    for note in getattr(err, "__notes__", ()):
        if note.startswith(_WHILE):
            result.append(note)
    return result
