"""`Tracker`: the numbers and samples of a run on disk, and in TensorBoard or W&B on request."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path

from spmdflow.errors import ConfigError
from spmdflow.tracking.line import append_lines, cut_back, drop_torn_line, set_aside
from spmdflow.tracking.sample import Sample
from spmdflow.tracking.sink import SINKS

logger = logging.getLogger(__name__)


class Tracker:
    """Writes RUN_DIR/metrics.jsonl and samples.jsonl; only the controller's process has one."""

    def __init__(self, run_dir: Path, trackers: Sequence[str] = ()) -> None:
        unknown = [name for name in trackers if name not in SINKS]
        if unknown:
            raise ConfigError(f"run.trackers: got {unknown}, expected {sorted(SINKS)}; name these")
        run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics_path = run_dir / "metrics.jsonl"
        self.samples_path = run_dir / "samples.jsonl"
        for path in (self.metrics_path, self.samples_path):
            drop_torn_line(path)
        self._sinks = [SINKS[name](run_dir) for name in dict.fromkeys(trackers)]

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
        records = [{"step": step} | _record(sample) for sample in samples]
        append_lines(self.samples_path, records)

    def cut_back(self, step: int) -> None:
        """Forget everything after `step`. -1, a start without checkpoint: set the files aside."""
        for path in (self.metrics_path, self.samples_path):
            if step < 0:
                set_aside(path)
            else:
                cut_back(path, step)
        for sink in self._sinks:
            sink.cut_back(step)

    def close(self) -> None:
        """End TensorBoard and W&B; the files need no closing."""
        while self._sinks:
            self._sinks.pop().close()


def _record(sample: Sample) -> dict[str, object]:
    score = float(sample.score) if isfinite(sample.score) else None
    record = {"prompt": sample.prompt, "response": sample.response, "score": score}
    return record | ({"terms": dict(sample.terms)} if sample.terms else {})
