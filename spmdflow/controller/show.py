"""What a step shows: a progress line, metrics.jsonl, a sample table, the trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmdflow.controller.batch import Batch
from spmdflow.controller.result import CallRecord
from spmdflow.data.row_id import Ids
from spmdflow.tracking.progress import progress_line
from spmdflow.tracking.sample import Sample, SampleTable
from spmdflow.tracking.trace import Span, TraceWriter
from spmdflow.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

_NUM_SAMPLES = 4
_SAMPLE_COLUMNS = ("prompt_text", "response_text", "scores", "score_terms")


class Show:
    """Writes and prints what steps measured."""

    def __init__(self, cfg: Any, run_dir: Path, *, last_step: int) -> None:
        self._tracker = Tracker(run_dir, list(cfg.run.trackers))
        self._tracker.cut_back(last_step)
        self._trace = TraceWriter(run_dir / "trace.json")
        self._table = SampleTable(cfg.run.sample_every)
        self._total_steps = cfg.total_steps

    def samples(self, step: int, scored: Batch | None) -> None:
        """Fetch, print and write a few scored rows, of as many prompts as there are."""
        if scored is None or not self._table.is_due(step):
            return
        names = [name for name in _SAMPLE_COLUMNS if name in scored.columns]
        values = scored.select(_spread(scored.parents)).fetch_for("samples", *names)
        samples = [
            Sample(str(prompt), str(response), float(score), *map(json.loads, terms))
            for prompt, response, score, *terms in zip(*map(values.get, names), strict=True)
        ]
        self._tracker.write_samples(step, samples)
        self._table.show(step, samples)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line on the terminal, one in metrics.jsonl."""
        self._tracker.write_metrics(step, metrics)
        logger.info("%s", progress_line(step, self._total_steps, metrics))

    def spans(self, records: Iterable[CallRecord]) -> None:
        """What every rank did when, for trace.json."""
        spans = [
            Span(rank, record.lane, record.label, *reply["span"])
            for record in records
            for rank, reply in record.pending.result().items()
        ]
        self._trace.write(spans)

    def close(self) -> None:
        """End the trackers."""
        self._trace.close()
        self._tracker.close()


def _spread(parents: Ids) -> list[int]:
    """Rows to show: the first of each prompt, then the second ones, in the order of the batch."""
    order = np.argsort(parents, kind="stable")
    starts = np.searchsorted(parents[order], parents[order])
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order)) - starts
    chosen = np.lexsort((np.arange(len(parents)), turn))[:_NUM_SAMPLES]
    return sorted(chosen.tolist())
