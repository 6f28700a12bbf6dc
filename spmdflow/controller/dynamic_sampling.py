"""`DynamicSampling`: draws prompts until enough of them can teach something."""

from __future__ import annotations

from typing import Any

from spmdflow.config.algorithm import DynamicSamplingConfig
from spmdflow.controller.batch import Batch, concatenate
from spmdflow.errors import RowError
from spmdflow.transfer.worker import Mean, Metric, Sum


class DynamicSampling:
    """Fills a batch with prompts whose samples differ in score (DAPO, Yu et al. 2025, eq. 11).

    A prompt whose samples (but those that failed) all have one score has advantages of zero and no
    gradient. Its rows are dropped, and more prompts drawn until num_rows rows are there; rows
    beyond that are dropped too. Reads the column "scores", and waits for it: the number of rows
    depends on data.
    """

    def __init__(self, num_rows: int, cfg: DynamicSamplingConfig) -> None:
        self._num_rows, self._cfg = num_rows, cfg
        self._kept: list[Batch] = []
        self._num_drawn = 0

    @property
    def is_full(self) -> bool:
        """Whether no further prompts are needed."""
        return self._num_kept >= self._num_rows

    def add(self, drawn: Batch) -> None:
        """Take the groups of one round that differ; RowError if the last round was not enough."""
        self._kept.append(drawn.filter_groups("scores", _differ))
        self._num_drawn += len(drawn)
        if len(self._kept) >= self._cfg.max_rounds and not self.is_full:
            raise RowError(
                f"dynamic sampling: got {self._num_kept} rows of prompts whose samples differ in "
                f"score, of {self._num_drawn} rows in {len(self._kept)} rounds, expected "
                f"{self._num_rows}; raise sampling.max_rounds, or choose prompts that the policy "
                f"solves sometimes but not always"
            )

    def batch(self) -> Batch:
        """The full batch, in the order in which its prompts were drawn."""
        assert self.is_full, (self._num_kept, self._num_rows)
        return concatenate(self._kept)[: self._num_rows]

    def metrics(self) -> dict[str, Metric]:
        """sampling/rounds, and sampling/kept: the share of drawn rows whose prompt differs."""
        kept = Mean(float(self._num_kept), float(self._num_drawn))
        return {"sampling/rounds": Sum(float(len(self._kept))), "sampling/kept": kept}

    @property
    def _num_kept(self) -> int:
        return sum(len(part) for part in self._kept)


def _differ(scores: list[Any]) -> bool:
    known = [score for score in scores if score == score]  # nan: the row failed
    return min(known, default=0) < max(known, default=0)
