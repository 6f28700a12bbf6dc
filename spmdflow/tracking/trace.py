"""`TraceWriter`: a timeline of all lanes of all ranks; `StepProfiler`: torch.profiler by step.

Both use Chrome's trace format. A trace is one JSON array with one event per line. Each write
replaces the closing bracket by new events and a bracket in one system call, so the file stays valid
JSON even if the run dies.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import profile, record_function

from spmdflow.checkpoint.disk import disk_errors

logger = logging.getLogger(__name__)

_EMPTY = b"[\n]\n"
_END = b"\n]\n"


class Span(NamedTuple):
    """One piece of work on a lane; start and end: time.time() of the node, in seconds."""

    rank: int
    lane: str
    label: str
    start: float
    end: float
    step: int = 0
    received_bytes: int = 0
    """Bytes of rows that a transfer received."""
    host_bytes: int = 0
    """Memory of the rank's process at the end of the span."""


class TraceWriter:
    """Appends spans to RUN_DIR/trace.json up to max_bytes; a resumed run continues the file."""

    def __init__(self, path: Path, *, max_bytes: int = 64 * 2**20) -> None:
        """Open the file, and repair it if a killed run left it torn."""
        self._path = path
        self._max_bytes = max_bytes
        self._threads: dict[tuple[int, str], int] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = self._repair_file()
        self._is_full = False

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans to trace.json, which stays valid JSON.

        If they would make the file larger than max_bytes, these and all later spans are dropped;
        the first time it warns. SpmdflowError if the disk fails.
        """
        if self._is_full:
            return
        events = []
        for span in spans:
            for event in self._events(Span(*span)):
                events.append(event)
        lines = []
        for event in events:
            lines.append(json.dumps(event, separators=(",", ":")).encode())
        if not lines:
            return
        if self._size + sum(map(len, lines)) + 2 * len(lines) + len(_END) > self._max_bytes:
            self._is_full = True
            logger.warning(
                "warning: %s: full at %d bytes; later spans are dropped", self._path, self._size
            )
            return
        self._append(b",\n".join(lines))

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _events(self, span: Span) -> list[dict[str, Any]]:
        """Return the Chrome trace events of a span; times in microseconds, args without zeros.

        The first span of a lane is preceded by two events that name its process ("rank 3") and
        thread. Threads of a rank are numbered from 0 as they occur.
        """
        key = (span.rank, span.lane)
        events: list[dict[str, Any]] = []
        if key not in self._threads:
            self._threads[key] = sum(1 for rank, _ in self._threads if rank == span.rank)
            for name, text in (("process", f"rank {span.rank}"), ("thread", span.lane)):
                events.append({"name": f"{name}_name", "ph": "M", "args": {"name": text}})
        start = round(span.start * 1e6)
        seconds = round((span.end - span.start) * 1e6)
        numbers = {"step": span.step, "bytes": span.received_bytes, "host_bytes": span.host_bytes}
        args = {}
        for name, number in numbers.items():
            if number:
                args[name] = number
        event = {"name": span.label, "ph": "X", "ts": start, "dur": max(0, seconds)}
        events.append(event | ({"args": args} if args else {}))
        return [event | {"pid": span.rank, "tid": self._threads[key]} for event in events]

    def _append(self, data: bytes) -> None:
        """Overwrite the closing bracket with data and a new bracket, if possible in one write.

        If the disk is full, the previous content is restored and SpmdflowError raised. data:
        events, separated by commas.
        """
        start = at = self._size - len(_END)
        left = memoryview((b"\n" if self._size == len(_EMPTY) else b",\n") + data + _END)
        with disk_errors("write", self._path, "tracking"):
            try:
                while left:  # a single iteration, unless the disk is almost full
                    written = os.pwrite(self._file, left, at)
                    left = left[written:]
                    at = at + written
            except OSError:
                os.pwrite(self._file, _END, start)  # restore the previous content
                os.ftruncate(self._file, self._size)
                raise
        self._size = at

    def _repair_file(self) -> int:
        """Make a new or torn file a valid JSON array; return its size in bytes.

        A file that ends with a bracket is left as it is. Otherwise it is written again, with the
        lines that are whole events.
        """
        size = os.fstat(self._file).st_size
        if size >= len(_EMPTY) and os.pread(self._file, len(_END), size - len(_END)) == _END:
            return size
        lines = os.pread(self._file, size, 0).split(b"\n")[1:]
        good = []
        for line in lines:
            if _is_event(line.rstrip(b",")):
                good.append(line.rstrip(b","))
        data = b"[\n" + b",\n".join(good) + _END if good else _EMPTY
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)
        return len(data)


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


class StepProfiler:
    """Records chosen steps of one rank with torch.profiler, for ui.perfetto.dev.

    RUN_DIR/profile/step_3_rank_0.json.gz has all operators of the compute lane (the only user of
    this class), the kernels on a device, and a range for each call of the script. A step's record
    starts with the step's first call. It is written, which takes seconds, at the first call of
    another step or when the run ends.
    """

    def __init__(self, steps: Collection[int], folder: Path, rank: int) -> None:
        """steps: those to record. folder: RUN_DIR/profile."""
        self._steps = steps
        self._folder = folder
        self._rank = rank
        self._running: tuple[int, profile] | None = None

    def call(self, step: int, label: str) -> AbstractContextManager[object]:
        """Return a context in which a call of this step runs, as a range in the profile.

        Before that it writes the profile of another step if one is running, and starts a new one if
        `step` is to be recorded. Without a profile the context does nothing.
        """
        if self._running is not None and self._running[0] != step:
            self.close()
        if self._running is None and step in self._steps:
            self._running = step, profile()
            self._running[1].start()
        if self._running is None:
            return nullcontext()
        return record_function(label)

    def close(self) -> None:
        """Stop the running profile, if there is one, and write it to step_<n>_rank_<k>.json.gz.

        SpmdflowError if the disk fails.
        """
        if self._running is None:
            return
        step, running = self._running
        self._running = None
        running.stop()
        path = self._folder / f"step_{step}_rank_{self._rank}.json.gz"
        with disk_errors("write", path, "profiling"):
            self._folder.mkdir(exist_ok=True)  # RUN_DIR itself must not be created again
            running.export_chrome_trace(str(path))
        logger.info("profile of step %d: %s", step, path)
