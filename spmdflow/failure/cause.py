"""What failed, on which rank first, and how it is reported to the user and in RUN_DIR.

Failures arrive in any order: if a rank dies, its peers fail too, often before the death is seen.
They are collected for a second. Then the cause is a death if there is one, otherwise a stopped
process, otherwise what a rank reported itself. Within a kind, the first to arrive is the cause.
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

_MAX_OTHERS = 3
_MAX_CHARACTERS = 160
SHOW_SECONDS = 20.0
"""To write the report of a failed run. torchrun kills its ranks 30 s after the first one ended."""
GATHER_SECONDS = 1.0
"""How long failures are collected before the cause is determined."""

UNWIND_SECONDS = 10.0
"""Time limit for ranks that are alive to leave a failed session."""

_ORDER = {"death": 0, "stopped": 1}
"""Kinds that explain the others, by priority. All other kinds come after them."""
SURVIVABLE_KINDS = ("exception", "script", "controller")
"""Kinds after which every process of the run may still be alive."""


@dataclass(frozen=True)
class Failure:
    """One failure on one rank."""

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
    """compute, transfer, files, or None outside the lanes."""
    traceback: str = ""
    own_traceback: str = ""
    """The part of the traceback in the user's code."""
    line: str = ""
    """The script's line that made the call: "file:line: text"."""
    where: str = ""
    """The line that the rank was running: "file:line in function: text". If the rank has finished
    the call because it skipped a collective, the line where the others wait."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970 on the node that noticed it."""

    def sentence(self) -> str:
        """Return "rank 3, actor.update_actor (call 12, compute lane): <cause>".

        Without a label it is "rank 3: <cause>".
        """
        if self.label:
            call = f", {self.label} (call {self.number}, {self.lane} lane)"
        else:
            call = ""
        return f"rank {self.rank}{call}: {self.cause}"


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others.

    A death comes before a stopped process, and both before all other kinds. Among equals, the first
    to arrive is returned. The death or stop of a rank that has reported another failure before
    counts as one of the other kinds, because the rank left on purpose. failures: at least one, in
    order of arrival.
    """

    def priority(index: int) -> tuple[int, int]:
        failure = failures[index]
        has_reported = any(
            earlier.rank == failure.rank and earlier.kind not in _ORDER
            for earlier in failures[:index]
        )
        # a rank that reported a failure and then left did not die of something else
        return (2 if has_reported else _ORDER.get(failure.kind, 2), index)

    return failures[min(range(len(failures)), key=priority)]


def failure_record(cause: Failure, others: Iterable[Failure]) -> dict[str, Any]:
    """The content of failure.json."""
    return _to_plain(cause) | {
        "others": [_to_plain(other) for other in others if other is not cause]
    }


def run_failed(cause: Failure) -> RunFailed:
    """Return the RunFailed for a cause, with its record and the failed rank's traceback as a note.

    The message is "run failed: " and the sentence of the cause. Raises nothing.
    """
    error = RunFailed(f"run failed: {cause.sentence()}", failure_record(cause, ()))
    if cause.traceback:
        error.add_note(f"on rank {cause.rank}:\n{cause.traceback}")
    return error


def write_failure(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record to path as JSON, replacing an older file.

    An OSError (full disk, missing folder) is logged and never raised; the partial file is removed.
    """
    try:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as err:
        logger.error("cannot write %s: %s", path, err)
        with contextlib.suppress(OSError):
            path.unlink()  # a full disk leaves an empty file


def print_report(cause: Failure, others: Sequence[Failure], path: Path | None) -> None:
    """Print one block on stderr: the cause, the script's line, the user's part of the traceback.

    Then up to three other causes with their ranks, and where the full tracebacks are. Nothing
    happens if stderr is closed. path: of failure.json; None if it was not written because RUN_DIR
    no longer belongs to this run.
    """
    lines = ["", "=" * 88, f"RUN FAILED: {cause.sentence()}"]
    if cause.line:
        lines.append(f"called at {cause.line}")
    if cause.where not in cause.cause:
        lines.append(f"its Python was at {cause.where}")
    lines += cause.own_traceback.rstrip().splitlines()
    first_line = cause.cause.partition("\n")[0]
    ranks: dict[str, list[int]] = {}
    for other in others:
        if other is not cause:
            ranks.setdefault(other.cause.partition("\n")[0], []).append(other.rank)
    for text, failed_ranks in list(ranks.items())[:_MAX_OTHERS]:
        if text == first_line:
            shown = "the same"
        else:
            shown = textwrap.shorten(text, _MAX_CHARACTERS)
        lines.append(f"also on rank {', '.join(map(str, sorted(failed_ranks)))}: {shown}")
    if path is not None:
        lines.append(f"full tracebacks: {path}; stacks: {path.parent / 'stacks-rank*.txt'}")
    lines += ["=" * 88, ""]
    with contextlib.suppress(OSError, ValueError):  # the launcher may have closed stderr
        sys.stderr.write("\n".join(lines))
        sys.stderr.flush()


def call_within(seconds: float, function: Callable[[], object]) -> None:
    """Call function in a thread, and wait at most this long for it to return."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def _to_plain(failure: Failure) -> dict[str, Any]:
    """Return a failure as JSON data, as in failure.json.

    The label becomes "role" and "method" (split at the last point), the number "call", and the time
    a local ISO 8601 text.
    """
    fields = asdict(failure)
    role, _, method = fields.pop("label").rpartition(".")
    fields["call"] = fields.pop("number")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(fields.pop("time")))
    return {"rank": fields["rank"], "role": role, "method": method} | fields | {"time": stamp}


_WHILE = "while "


@contextlib.contextmanager
def error_context(activity: str) -> Iterator[None]:
    """Add the note "while <activity>" to each SpmdflowError that leaves the context.

    The same error is raised. Other exceptions are not changed.
    """
    try:
        yield
    except SpmdflowError as err:
        err.add_note(_WHILE + activity)
        raise


def error_contexts(err: BaseException) -> list[str]:
    """Return the notes that `error_context` added to an error, innermost first, each with "while ".

    Empty if there are none. They are recognised by that first word.
    """
    contexts = []
    for note in getattr(err, "__notes__", ()):
        if note.startswith(_WHILE):
            contexts.append(note)
    return contexts
