"""`Tracker`: the numbers and samples of a run on disk, and in TensorBoard or W&B on request.

Files are JSON Lines: appended, read and cut back, safe against a kill at any moment. A kill can
only tear the last line. Readers skip lines that are not an object with an integer `step`; rewriting
goes through a second file and a rename. TensorBoard and W&B are imported only on request.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from spmdflow.checkpoint.disk import disk_errors, write_atomically
from spmdflow.errors import ConfigError
from spmdflow.kind.registry import TRACKERS, resolve
from spmdflow.tracking.progress import Sample

logger = logging.getLogger(__name__)


class Tracker:
    """Writes RUN_DIR/metrics.jsonl and samples.jsonl; only the controller's process has one."""

    def __init__(self, run_dir: Path, trackers: Sequence[str] = (), *, last_step: int = -1) -> None:
        """last_step: records after it are dropped; -1 (no checkpoint to continue from): old files
        are renamed."""
        sinks: list[Callable[[Path, int], Sink]] = [
            resolve(TRACKERS.find(name)) for name in dict.fromkeys(trackers)
        ]
        run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics_path = run_dir / "metrics.jsonl"
        self.samples_path = run_dir / "samples.jsonl"
        self._sinks = [sink(run_dir, last_step) for sink in sinks]
        for path in (self.metrics_path, self.samples_path):
            if last_step < 0:
                set_aside(path)
            else:
                cut_back(path, last_step)

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step; numbers that are not finite become null, with a warning."""
        numbers = {name: float(metrics[name]) for name in sorted(metrics)}
        finite = {name: value for name, value in numbers.items() if isfinite(value)}
        if len(finite) < len(numbers):
            others = {name: value for name, value in numbers.items() if name not in finite}
            logger.warning("step %s: not finite, written as null: %s", step, others)
        append_lines(self.metrics_path, [{"step": step} | {n: finite.get(n) for n in numbers}])
        for sink in self._sinks:
            sink.write(step, finite)

    def write_samples(self, step: int, samples: Iterable[Sample]) -> None:
        """Append one line for each sample."""
        append_lines(self.samples_path, [{"step": step} | sample.to_plain() for sample in samples])

    def close(self) -> None:
        """End TensorBoard and W&B; the files need no closing."""
        while self._sinks:
            self._sinks.pop().close()


class Sink(Protocol):
    """A further place for finite metrics; constructed with (run_dir, last_step), see `Tracker`.

    Your own: `@register_tracker("name")` in the script, then run.trackers=[name].
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoardSink:
    """Event files in RUN_DIR/tensorboard; readers hide earlier events after last_step."""

    def __init__(self, run_dir: Path, last_step: int) -> None:
        # Any: torch ships the writer, tensorboard the types
        module: Any = _imported("tensorboard", "torch.utils.tensorboard")
        self._writer = module.SummaryWriter(run_dir / "tensorboard", purge_step=last_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbSink:
    """One W&B run for each RUN_DIR, continued on resume: its id is in RUN_DIR/wandb_id.

    Project, entity and mode come from W&B's own variables (WANDB_PROJECT, WANDB_MODE, ...).
    Points of steps that a resumed run repeats stay beside the new ones: W&B cannot delete rows.
    """

    def __init__(self, run_dir: Path, last_step: int) -> None:
        wandb: Any = _imported("wandb", "wandb")  # Any: the extra may be absent
        id_path = run_dir / "wandb_id"
        if not id_path.exists():
            id_path.write_text(secrets.token_hex(8))
        try:
            self._run = wandb.init(
                name=run_dir.name, dir=run_dir, id=id_path.read_text().strip(), resume="allow"
            )
        except wandb.Error as err:
            raise ConfigError(
                f"run.trackers: wandb does not start ({err}), expected an account it can reach; "
                f"log in with `wandb login`, set WANDB_MODE=offline or leave wandb out"
            ) from err
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; `step` is its x axis."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def _imported(extra: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as err:
        raise ConfigError(
            f"run.trackers: {extra} is asked for but cannot be imported ({err}), expected the "
            f"package; pip install 'spmdflow[{extra}]' or leave it out"
        ) from err


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one line for each record; written to the kernel at return, not fsynced."""
    short = (",", ":")
    lines = (json.dumps(record, allow_nan=False, separators=short) for record in records)
    text = "".join(f"{line}\n" for line in lines)
    with disk_errors("write", path, "tracking"), path.open("ab") as file:
        file.write(text.encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, skipping torn or invalid lines; [] if there is no file."""
    if not path.exists():
        return []
    return [record for _, record in _records(path)]


def cut_back(path: Path, step: int) -> None:
    """Drop the records of steps after `step`, and torn or invalid lines; atomic."""
    if not path.exists():
        return
    kept = b"".join(line for line, record in _records(path) if record["step"] <= step)
    if kept != path.read_bytes():
        with disk_errors("write", path, "tracking"):
            write_atomically(path, kept)


def set_aside(path: Path) -> None:
    """Rename a file that has content to the first free NAME.1.jsonl, NAME.2.jsonl, ..."""
    if not path.exists() or not path.stat().st_size:
        return
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    with disk_errors("write", path, "tracking"):
        path.rename(aside)
    logger.warning("%s: the run starts from its first step; the old one is %s", path, aside.name)


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each valid line, with its newline, and its record; warns about the others."""
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
