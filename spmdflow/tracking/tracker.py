"""`Tracker`: writes the metrics and samples of a run to disk and to the sinks of run.trackers.

Files are JSON Lines, and survive a kill at any moment. A kill can only tear the last line. Readers
skip lines that are not an object with an integer `step`. A file is rewritten by writing a second
file and renaming it.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.disk import disk_errors, sync, write_atomically
from spmdflow.errors import ConfigError
from spmdflow.kind.registry import TRACKERS, Reference, resolve
from spmdflow.tracking.progress import Sample

logger = logging.getLogger(__name__)


class Sink(ABC):  # a subclass may override the methods that do nothing here
    """A further destination of a run's records; exists only in the controller's process.

    Write a subclass with `write`. Register it with `@register_tracker("name")` in the script, or as
    an entry point of the group `spmdflow.trackers` in a package. Then set run.trackers=[name].
    After an exception in any method but `__init__` the run continues without the sink, and warns.
    """

    advice = ""
    """What to do if the sink does not start, as the start of an imperative sentence."""

    def __init__(self, run_dir: Path, last_step: int) -> None:
        """last_step: see `Tracker`. An exception here ends the run before its first step."""
        self.run_dir = run_dir
        self.last_step = last_step

    @property
    def run_id(self) -> str:
        """16 hexadecimal digits, the same at every start that continues the run."""
        return (self.run_dir / _RUN_ID).read_text()

    def describe(self, facts: Mapping[str, Any]) -> None:  # noqa: B027
        """Record facts of the run, once per start. facts: a flat mapping of data for JSON."""

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; all are finite."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:  # noqa: B027
        """Record a few scored rows of a step; called every run.sample_every steps."""

    def close(self) -> None:  # noqa: B027
        """Flush and close the sink."""


_RUN_ID = "tracker_id"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"


class Tracker:
    """Writes RUN_DIR/metrics.jsonl and samples.jsonl; exists only in the controller's process."""

    def __init__(self, run_dir: Path, trackers: Sequence[str] = (), *, last_step: int = -1) -> None:
        """Start the sinks, and prepare the files for the steps after last_step.

        last_step: step of the checkpoint from which the run continues; later records are dropped.
        -1 (no checkpoint): old files are renamed, and sinks begin a new run. ConfigError if a sink
        does not start.
        """
        references = {}
        for name in trackers:
            references[name] = TRACKERS.find(name)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics_path = run_dir / METRICS
        self.samples_path = run_dir / SAMPLES
        id_path = run_dir / _RUN_ID
        with disk_errors("write", id_path, "tracking"):
            if id_path.is_dir():
                set_aside(id_path)
            if last_step < 0 or not _is_run_id(id_path):
                id_path.unlink(missing_ok=True)
            if references and not id_path.exists():
                write_atomically(id_path, secrets.token_hex(8).encode())
        self._sinks = {
            name: _start_sink(name, reference, run_dir, last_step)
            for name, reference in references.items()
        }
        for path in (self.metrics_path, self.samples_path):
            if last_step < 0 or path.is_dir():
                set_aside(path)
            else:
                cut_back(path, last_step)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Pass facts of the run to the sinks: settings, versions and git, under flat names."""
        self._tell(lambda sink: sink.describe(facts))

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step's metrics to metrics.jsonl, sorted by name, and pass them to the sinks.

        Numbers that are not finite become null, with a warning; sinks do not get them.
        SpmdflowError if the disk fails.
        """
        numbers = {}
        for name in sorted(metrics):
            numbers[name] = float(metrics[name])
        finite = {}
        for name, value in numbers.items():
            if isfinite(value):
                finite[name] = value
        if len(finite) < len(numbers):
            others = {}
            for name, value in numbers.items():
                if name not in finite:
                    others[name] = value
            logger.warning("warning: step %s: not finite, written as null: %s", step, others)
        append_lines(self.metrics_path, [{"step": step} | {n: finite.get(n) for n in numbers}])
        self._tell(lambda sink: sink.write(step, finite))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append one line for each sample."""
        append_lines(self.samples_path, [{"step": step} | sample.to_plain() for sample in samples])
        self._tell(lambda sink: sink.write_samples(step, samples))

    def close(self) -> None:
        """Close the sinks; the files need no closing."""
        self._tell(lambda sink: sink.close())
        self._sinks.clear()

    def _tell(self, call: Callable[[Sink], None]) -> None:
        """Call call(sink) for every sink; if one raises, warn, and drop it until the next start."""
        for name, sink in [*self._sinks.items()]:
            try:
                call(sink)
            except Exception as err:  # of any library: a tracker must not end a run
                del self._sinks[name]
                logger.warning(
                    "warning: run.trackers: %s failed (%s); "
                    "it is disabled until the next start, see %s for all steps",
                    name,
                    _error_text(err),
                    self.metrics_path,
                )


def _is_run_id(path: Path) -> bool:
    """Return whether a file has a valid `Sink.run_id` (16 hexadecimal digits).

    Warns about a damaged one. False if it does not exist.
    """
    if not path.exists():
        return False
    is_valid = re.fullmatch(rb"[0-9a-f]{16}", path.read_bytes()) is not None
    if not is_valid:
        logger.warning("warning: %s is damaged: trackers begin a new run", path)
    return is_valid


def _start_sink(name: str, reference: Reference, run_dir: Path, last_step: int) -> Sink:
    """Return a new sink of the class that `reference` leads to.

    ConfigError if the class cannot be imported, does not derive from spmdflow.Sink, or fails to
    start; the text has the class's `advice`. name: as in run.trackers.
    """
    advice = ""
    try:
        sink = resolve(reference)
        if not (isinstance(sink, type) and issubclass(sink, Sink)):
            do = f"let {name}'s class derive from spmdflow.Sink"
            raise ConfigError.of("run.trackers", reference, "a subclass of spmdflow.Sink", do)
        advice = sink.advice and f"{sink.advice} or "
        return sink(run_dir, last_step)
    except ConfigError:
        raise
    except Exception as err:  # of any library
        got = f"{name}, which does not start ({_error_text(err)})"
        expected = "one that can be imported, reached and logged in to"
        do = f"{advice}remove {name} from run.trackers"
        raise ConfigError.of("run.trackers", got, expected, do) from err


def _error_text(err: Exception) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())}"


def sync_records(run_dir: Path) -> None:
    """fsync metrics.jsonl, samples.jsonl and RUN_DIR, so that their records survive a power cut.

    A checkpoint is sealed only after this, so that a run that continues from it has the records of
    all earlier steps. Missing files are skipped. SpmdflowError if the disk fails.
    """
    with disk_errors("write", run_dir, "tracking"):
        for path in (run_dir / METRICS, run_dir / SAMPLES):
            if path.exists():
                sync(path)
        sync(run_dir)


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one JSON line for each record, in one write.

    The kernel has the data on return; it is not fsynced. ValueError for nan or infinity, before
    anything is written. SpmdflowError if the disk fails.
    """
    short = (",", ":")
    lines = (json.dumps(record, allow_nan=False, separators=short) for record in records)
    text = "".join(f"{line}\n" for line in lines)
    with disk_errors("write", path, "tracking"), path.open("ab") as file:
        file.write(text.encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file without torn or invalid lines; [] if there is no file."""
    if not path.is_file():
        return []
    return [record for _, record in _records(path)]


def cut_back(path: Path, step: int) -> None:
    """Drop the records of steps after `step`, and torn or invalid lines, from a JSON Lines file.

    The file is replaced atomically, and only if that changes it. Does nothing without a file.
    """
    if not path.exists():
        return
    remaining = b"".join(line for line, record in _records(path) if record["step"] <= step)
    if remaining != path.read_bytes():
        with disk_errors("write", path, "tracking"):
            write_atomically(path, remaining)


def set_aside(path: Path) -> None:
    """Rename a file or folder to the first free name of STEM.1.SUFFIX, STEM.2.SUFFIX, ...

    metrics.jsonl becomes metrics.1.jsonl. Logs the new name. Does nothing if it does not exist or
    is an empty file.
    """
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    with disk_errors("write", path, "tracking"):
        path.rename(aside)
    if aside.is_dir():
        logger.warning(
            "warning: %s was a folder instead of a file; renamed it to %s", path, aside.name
        )
        return
    logger.warning(
        "%s: the run starts from its first step; renamed the old file to %s", path, aside.name
    )


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line with its newline, record) of each valid line; warn about each other line."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        record = _record_or_none(line)
        if record is not None:
            yield line, record
        else:
            logger.warning("warning: %s:%d: skipped, not a complete record of a step", path, number)


def _record_or_none(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if it is torn or is not a record of a step.

    Valid are only objects with an integer `step`, on a line that ends with a newline.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # torn JSON or torn UTF-8, or noise with many brackets
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    if is_record and line.endswith(b"\n"):
        return record
    return None
