"""`RunFiles`: reads the files of a RUN_DIR for `view`, `report`, `throughput` and `status`.

Every file is optional, because a run may be live, killed, or of an earlier version. `missing` lists
files that do not exist or cannot be read. Each file is read on first access.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from spmdflow.checkpoint.lock import is_run_live, read_record
from spmdflow.config.leaf import flat
from spmdflow.errors import DataError
from spmdflow.tracking.servers import ServerRecord, read_servers
from spmdflow.tracking.trace import Span
from spmdflow.tracking.tracker import read_lines

Record = Mapping[str, Any]  # Any: JSON values; null where a number was not finite
FILES = {
    "config.yaml": "settings",
    "metrics.jsonl": "metrics",
    "samples.jsonl": "samples",
    "trace.json": "spans",
    "prediction.json": "prediction",
}
"""File -> the property that reads it; a failed run has no prediction."""
FINISHED_FILE = "finished"
"""In RUN_DIR after the last step (`checkpoint.run_dir` writes it)."""
THROUGHPUT_FILE = "throughput.jsonl"
"""In RUN_DIR: one object for each step, with its tokens (`controller.throughput_log` writes it)."""
LAUNCHES_FILE = "launches.jsonl"
"""In RUN_DIR: one object for each start: command, versions, devices, models (the same writer)."""
_MARKS = ("config.yaml", "metrics.jsonl", "checkpoints")


class RunState(Enum):
    """State of the last run in a RUN_DIR; the value describes it."""

    LIVE = "it runs"
    FAILED = "the last one failed (above)"
    KILLED = "the last one was killed, its rank 0 said nothing; the same command continues it"
    FINISHED = "the last one finished"
    STOPPED = "the last one was stopped before its last step; the same command continues it"
    NONE = "none has been in this folder"


class RunFiles:
    """The files of one RUN_DIR: `RunFiles(Path("runs/ppo")).metrics[-1]["reward/mean"]`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.absolute().name

    @property
    def is_live(self) -> bool:
        """Whether a run holds the lock of this folder, also on another node (see
        `checkpoint.lock`)."""
        return is_run_live(self.path)

    @property
    def run_state(self) -> RunState:
        """Return whether a run is live here, or how the last run ended.

        The first that applies: LIVE (lock held), FAILED (failure*.json), KILLED (the lock file has
        a record), FINISHED (file `finished`), STOPPED (config.yaml, metrics.jsonl or checkpoints),
        NONE.
        """
        if self.is_live:
            return RunState.LIVE
        if self.failures:
            return RunState.FAILED
        if read_record(self.path) is not None:  # a run that ends normally removes it
            return RunState.KILLED
        if (self.path / FINISHED_FILE).exists():
            return RunState.FINISHED
        if any((self.path / mark).exists() for mark in _MARKS):
            return RunState.STOPPED
        return RunState.NONE

    @property
    def missing(self) -> list[str]:
        """Return the names in `FILES` that do not exist or have no readable content.

        Reads all of these files.
        """
        result = []
        for file, part in FILES.items():
            if not getattr(self, part):
                result.append(file)
        return result

    @cached_property
    def metrics(self) -> Sequence[Record]:
        """One record for each finished step."""
        return read_lines(self.path / "metrics.jsonl")

    @cached_property
    def samples(self) -> Sequence[Record]:
        """Logged samples; earlier versions wrote only prompt, response, score and terms."""
        return read_lines(self.path / "samples.jsonl")

    @cached_property
    def throughput(self) -> Sequence[Record]:
        """Tokens and passes of each finished step; [] in runs of earlier versions."""
        return read_lines(self.path / THROUGHPUT_FILE)

    @cached_property
    def launches(self) -> Sequence[Record]:
        """Facts of each start of the run, in order; [] in runs of earlier versions."""
        return read_lines(self.path / LAUNCHES_FILE)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """All settings by dotted key."""
        return _read_settings(self.path / "config.yaml")

    @cached_property
    def earlier_settings(self) -> Mapping[str, Mapping[str, Any]]:
        """Return file name -> settings by dotted key, of each config.until-step-N.yaml.

        A run that was continued with changed settings has these. Unreadable files are omitted.
        """
        settings_by_file = {}
        for path in self._matching_files("config.until-step-*.yaml"):
            settings = _read_settings(path)
            if settings:
                settings_by_file[path.name] = settings
        return settings_by_file

    @cached_property
    def spans(self) -> Sequence[Span]:
        """All spans of the trace; step is 0 in spans that were recorded without one."""
        return list(_read_spans(self.path / "trace.json"))

    @cached_property
    def prediction(self) -> Record:
        """Predicted and measured seconds and bytes (`plan.comparison`)."""
        return read_json(self.path / "prediction.json")

    @cached_property
    def failures(self) -> Mapping[str, Record]:
        """Return file name -> record of a failure (`failure.cause`), of each failure*.json.

        An unreadable file has the record {}.
        """
        result = {}
        for path in self._matching_files("failure*.json"):
            result[path.name] = read_json(path)
        return result

    @cached_property
    def servers(self) -> Sequence[ServerRecord]:
        """The generation servers that ranks of the last start have reported."""
        return read_servers(self.path)

    @cached_property
    def stacks(self) -> Mapping[str, str]:
        """Return file name -> text of each stacks-rank*.txt that is readable and not empty."""
        texts = {}
        for path in self._matching_files("stacks-rank*.txt"):
            text = ""
            with suppress(OSError):  # a run that ends removes its empty files
                text = path.read_text(encoding="utf-8", errors="replace")
            if text:
                texts[path.name] = text
        return texts

    def needed_metrics(self) -> Sequence[Record]:
        """Return the records of metrics.jsonl; DataError if there are none."""
        if not self.metrics:
            path = self.path / "metrics.jsonl"
            state = "is empty" if path.exists() else "is not there"
            raise DataError(
                f"report: {path} {state}, expected one line per finished step; "
                f"give the folder that a run printed at its start"
            )
        return self.metrics

    def _matching_files(self, pattern: str) -> list[Path]:
        return sorted(self.path.glob(pattern))


def failure_text(failure: Record) -> str:
    """Return one line: the failed rank and call, the cause, and the Python line if it is known.

    "rank 3, actor.update_actor (call 12): CAUSE; its Python was at LINE". Missing fields are shown
    as None.
    """
    call = f"{failure.get('role')}.{failure.get('method')} (call {failure.get('call')})"
    if failure.get("where"):
        where = f"; its Python was at {failure['where']}"
    else:
        where = ""
    return f"rank {failure.get('rank')}, {call}: {failure.get('cause')}{where}"


def setting_differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return key -> its value in each of `settings`, for keys whose values are not all equal.

    A missing key has the value "(absent)". Keys are in the order in which they first occur.
    """
    keys = dict.fromkeys(key for each in settings for key in each)
    differences = {}
    for key in keys:
        values = [each.get(key, "(absent)") for each in settings]
        if any(value != values[0] for value in values):
            differences[key] = values
    return differences


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file cannot be read or has no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(value, dict):
        return value
    return {}


def _read_settings(path: Path) -> dict[str, Any]:
    """Return a YAML file's settings by dotted key; {} if unreadable or not a mapping."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    if isinstance(value, dict):
        return flat(value)
    return {}


def _read_spans(path: Path) -> Iterator[Span]:
    """Yield the spans of a trace.json in file order; nothing if it cannot be read.

    A span is an event with "ph": "X"; its lane is the last thread name before it, or "". Torn lines
    and other events are skipped. Times are converted from microseconds to seconds.
    """
    if not path.exists():
        return
    lanes: dict[tuple[int, int], str] = {}
    try:
        data = path.read_bytes()
    except OSError:
        return
    for line in data.splitlines():
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # brackets, a torn line, or a foreign event
            event = json.loads(line.rstrip(b","))
            key = (event["pid"], event["tid"])
            if event["name"] == "thread_name":
                lanes[key] = event["args"]["name"]
            if event["ph"] == "X":
                args = event.get("args", {})
                start = event["ts"] / 1e6
                numbers = []
                for name in ("step", "bytes", "host_bytes"):
                    numbers.append(args.get(name, 0))
                lane = lanes.get(key, "")
                end = start + event["dur"] / 1e6
                yield Span(key[0], lane, event["name"], start, end, *numbers)
