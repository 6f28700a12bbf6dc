"""`RunFiles`: what a RUN_DIR holds, read for people: `spmdflow.view`, `report` and `status`.

No file is needed: a run may be live, killed, or of an earlier version. What is not there, or cannot
be read, is named in `missing`. Each file is read when it is first asked for.
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
"""File -> the property that it gives; a failed run has no prediction."""
FINISHED_FILE = "finished"
"""In RUN_DIR once the last step is done (`checkpoint.run_dir` writes it)."""
_MARKS = ("config.yaml", "metrics.jsonl", "checkpoints")


class RunState(Enum):
    """What became of the last run in a RUN_DIR; the value is a sentence."""

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
        """The folder's own name."""
        return self.path.absolute().name

    @property
    def is_live(self) -> bool:
        """Whether a run holds the lock of this folder (`checkpoint.lock` tells of other nodes)."""
        return is_run_live(self.path)

    @property
    def run_state(self) -> RunState:
        """Live, or how the last run here ended."""
        if self.is_live:
            return RunState.LIVE
        if self.failures:
            return RunState.FAILED
        if read_record(self.path) is not None:  # who ends by itself removes it
            return RunState.KILLED
        if (self.path / FINISHED_FILE).exists():
            return RunState.FINISHED
        if any((self.path / mark).exists() for mark in _MARKS):
            return RunState.STOPPED
        return RunState.NONE

    @property
    def missing(self) -> list[str]:
        """Files that are not there or of which nothing can be read."""
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
        """Shown responses; earlier versions wrote prompt, response, score and terms alone."""
        return read_lines(self.path / "samples.jsonl")

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Every setting by its dotted key."""
        return _settings(self.path / "config.yaml")

    @cached_property
    def earlier_settings(self) -> Mapping[str, Mapping[str, Any]]:
        """File -> the settings until a step, of a run that was continued with others."""
        found = {}
        for path in self._named("config.until-step-*.yaml"):
            found[path.name] = _settings(path)
        result = {}
        for name, settings in found.items():
            if settings:
                result[name] = settings
        return result

    @cached_property
    def spans(self) -> Sequence[Span]:
        """What every rank did when; a step of 0 was not told."""
        return list(_spans(self.path / "trace.json"))

    @cached_property
    def prediction(self) -> Record:
        """Predicted beside measured seconds and bytes (`plan.comparison`)."""
        return read_json(self.path / "prediction.json")

    @cached_property
    def failures(self) -> Mapping[str, Record]:
        """File -> what a rank said of a failure (`runtime.failure`)."""
        result = {}
        for path in self._named("failure*.json"):
            result[path.name] = read_json(path)
        return result

    @cached_property
    def stacks(self) -> Mapping[str, str]:
        """File -> the stacks that a rank wrote."""
        found = {}
        for path in self._named("stacks-rank*.txt"):
            with suppress(OSError):  # a run that ends removes those that are empty
                found[path.name] = path.read_text(encoding="utf-8", errors="replace")
        result = {}
        for name, text in found.items():
            if text:
                result[name] = text
        return result

    def needed_metrics(self) -> Sequence[Record]:
        """The records of metrics.jsonl; DataError if there are none."""
        if not self.metrics:
            path = self.path / "metrics.jsonl"
            state = "is empty" if path.exists() else "is not there"
            raise DataError(
                f"report: {path} {state}, expected one line per finished step; "
                f"give the folder that a run printed at its start"
            )
        return self.metrics

    def _named(self, pattern: str) -> list[Path]:
        return sorted(self.path.glob(pattern))


def failure_text(failure: Record) -> str:
    """One line: who failed in which call, why, and where its Python was."""
    call = f"{failure.get('role')}.{failure.get('method')} (call {failure.get('call')})"
    if failure.get("where"):
        where = f"; its Python was at {failure['where']}"
    else:
        where = ""
    return f"rank {failure.get('rank')}, {call}: {failure.get('cause')}{where}"


def setting_differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key -> its value in each, "(absent)" where there is none, for the keys that differ."""
    keys = dict.fromkeys(key for each in settings for key in each)
    found = {}
    for key in keys:
        found[key] = [each.get(key, "(absent)") for each in settings]
    result = {}
    for key, values in found.items():
        if any(v != values[0] for v in values):
            result[key] = values
    return result


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file; {} if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(found, dict):
        return found
    return {}


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    if isinstance(found, dict):
        return flat(found)
    return {}


def _spans(path: Path) -> Iterator[Span]:
    """The spans of a trace, in its order; a line that is cut off is left out."""
    if not path.exists():
        return
    lanes: dict[tuple[int, int], str] = {}
    try:
        data = path.read_bytes()
    except OSError:
        return
    for line in data.splitlines():
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # the brackets, a torn line, or what is no event of ours
            event = json.loads(line.rstrip(b","))
            key = (event["pid"], event["tid"])
            if event["name"] == "thread_name":
                lanes[key] = event["args"]["name"]
            if event["ph"] == "X":
                told = event.get("args", {})
                start = event["ts"] / 1e6
                numbers = []
                for name in ("step", "bytes", "host_bytes"):
                    numbers.append(told.get(name, 0))
                lane = lanes.get(key, "")
                end = start + event["dur"] / 1e6
                yield Span(key[0], lane, event["name"], start, end, *numbers)
