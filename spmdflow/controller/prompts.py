"""`PromptStream`: batches of prompts for the script. Only row numbers pass the controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from spmdflow.config.algorithm import DynamicSamplingConfig
from spmdflow.config.schema import DataSettings
from spmdflow.controller.batch import Batch, concatenate
from spmdflow.controller.caller import Caller
from spmdflow.controller.result import ColumnRef, SourceRows
from spmdflow.data.row_id import Ids, held_out_ids
from spmdflow.datasets.scan import ScanReport, join_reports
from spmdflow.datasets.stream import PromptOrder, eval_rows
from spmdflow.errors import ConfigError, ProtocolError, RowError
from spmdflow.worker_api.metric import Mean, Metric, Sum

logger = logging.getLogger(__name__)

_COLUMNS = {
    "prompts": ("prompts", "prompt_text", "row"),
    "examples": ("prompts", "responses", "loss_mask"),
    "pairs": ("prompts", "responses", "loss_mask", "chosen_tokens"),
    "labels": ("prompts", "responses", "loss_mask", "desirable"),
}
"""What a row is (`rows` of its settings) -> columns of the batch."""


ROWS_AT_ONCE = 2_000_000
"""Rows of a scanned file that travel to the controller in one message, of 12 bytes each."""
MAIN_STREAM = "prompts"
"""The name of a run's first stream of prompts."""


class PromptStream(Iterator[Batch]):
    """`next(stream)` is a batch of prompts_per_step prompts, each samples_per_prompt times.

    Rank 0 scans the files once; each rank reads the rows that it needs.
    """

    def __init__(
        self,
        cfg: DataSettings,
        caller: Caller,
        *,
        name: str,
        seed: int,
        log: Callable[[Mapping[str, Metric]], None],
    ) -> None:
        """Scan the files and make them known to every rank of the run.

        name: of the stream, in labels of calls. log: takes metrics of the step that is running.
        """
        self._cfg = cfg
        self._caller = caller
        self._name = name
        self._log = log
        self.train_scan = self._open(f"{name}.train", cfg.train_path)
        self.eval_scan = self._open(f"{name}.eval", cfg.eval_path)
        self._order: PromptOrder | None = None
        if self.train_scan is not None:
            size = cfg.prompts_per_step
            shuffle = cfg.shuffle
            self._order = PromptOrder(
                self.train_scan,
                prompts_per_step=size,
                seed=seed,
                shuffle=shuffle,
                name="" if name == MAIN_STREAM else name,
            )

    def __next__(self) -> Batch:
        """The prompts of the next step, each samples_per_prompt times; reports their sources."""
        if self._order is None or self.train_scan is None:
            got = "no prompts to train on"
            do = "set it, or take eval_batch()"
            raise ProtocolError.of(self._name, got, "data.train_path", do)
        rows = self._order.next_rows()
        repeat = self._cfg.samples_per_prompt
        files = self.train_scan.files
        if len(files) > 1:  # a mixture: prompts of the step from each source, as data/<name>
            counts = np.bincount(self.train_scan.file_of(rows), minlength=len(files)).tolist()
            named = zip(files, counts, strict=True)
            self._log({f"data/{file.name}": Sum(count) for file, count in named})
        ids, parents = self._caller.row_ids.take_groups(len(rows), repeat)
        return self._batch("train", self.train_scan, rows, ids, parents)

    def eval_batch(self) -> Batch:
        """Every held-out prompt once (those of data.eval_prompts); ConfigError without a file."""
        return self._held_out(1)

    def eval_samples(self) -> Batch:
        """The same prompts, repeated for the samples of data.eval_samples (may be 0)."""
        return self._held_out(self._cfg.eval_samples)

    def describe(self, batch: Batch) -> dict[str, Any]:
        """Return the file rows, ids and parents of a training batch as lists, for `restore`."""
        rows = batch.column("prompts")
        assert isinstance(rows.result, SourceRows), rows.result.label
        numbers = rows.result.part(rows.ids)[0]
        arrays = {"rows": numbers, "ids": batch.ids, "parents": batch.parents}
        result = {}
        for name, values in arrays.items():
            result[name] = values.tolist()
        return result

    def restore(self, plain: Mapping[str, Any]) -> Batch:
        """The batch that `describe` was given, under its row ids; the position stays."""
        assert self.train_scan is not None, self._name
        ids, parents = (np.asarray(plain[name], dtype=np.int64) for name in ("ids", "parents"))
        return self._batch("train", self.train_scan, list(plain["rows"]), ids, parents)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        if self._order is None:
            return {}
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        if self._order is not None:
            self._order.load_state_dict(state)

    def _open(self, name: str, path: Any) -> ScanReport | None:
        """Have the first rank read the files once, and every rank open them; return its report.

        None if path is None. Waits for the first rank, whose report comes in parts of at most
        ROWS_AT_ONCE rows, but not for the opening. Logs a summary.
        """
        if path is None:
            return None
        caller = self._caller
        first = self._caller.ranks[0]
        command = {"operation": "scan", "data": self._cfg, "path": path, "most_rows": ROWS_AT_ONCE}
        reply = caller.submit(f"{name}.scan", {first: command}).result()[first]
        parts: list[ScanReport] = [reply["report"]]
        while not reply.get("is_whole", True):
            start = sum(len(part.rows) for part in parts)
            more = {"operation": "scan_more", "start": start, "most_rows": ROWS_AT_ONCE}
            reply = caller.submit(f"{name}.scan_more", {first: more}).result()[first]
            parts.append(reply["report"])
        report = join_reports(parts)
        logger.info("%s", report.describe())
        files = {"files": report.files, "data": self._cfg}
        command = {"operation": "source", "name": name} | files
        caller.submit(f"{name}.open", {rank: dict(command) for rank in caller.ranks})
        return report

    def _held_out(self, repeat: int) -> Batch:
        """Return each of the first data.eval_prompts held-out prompts `repeat` times (0: no rows).

        The ids are the same at every call. ConfigError without data.eval_path.
        """
        if self.eval_scan is None:
            raise no_held_out_prompts()
        rows = eval_rows(self.eval_scan, self._cfg.eval_prompts)
        ids, parents = held_out_ids(np.asarray(rows), repeat)
        return self._batch("eval", self.eval_scan, rows, ids, parents)

    def _batch(
        self, part: str, report: ScanReport, rows: list[int], ids: Ids, parents: Ids
    ) -> Batch:
        """Return a batch of the given rows of a file; nothing is read yet.

        part: train or eval. rows: row numbers. ids, parents: (len(rows) * n,); each row is repeated
        n times in succession. data.rows determines the columns; with "labels" there is also
        `answers`, the answer of the previous row, for KTO's mismatched pairs.
        """
        numbers = np.repeat(np.asarray(rows, dtype=np.int64), len(ids) // len(rows))
        parts = [(_COLUMNS[self._cfg.rows], numbers)]
        if self._cfg.rows == "labels":
            # KTO estimates the KL from mismatched pairs: each row with the answer of the one before
            parts.append((("answers",), np.roll(numbers, 1)))
        caller = self._caller
        columns: dict[str, ColumnRef] = {}
        for names, numbers in parts:
            number = caller.next_number()
            tokens = report.tokens_of(numbers.tolist())
            label = f"{self._name}.{part}"
            result = SourceRows(number, label, ids, numbers, caller.freed.append, tokens)
            columns |= {name: ColumnRef(result, ids, name) for name in names}
        return Batch(caller, ids, parents, columns)


def no_held_out_prompts() -> ConfigError:
    """The error of an evaluation without data.eval_path."""
    got = "no held-out prompts"
    return ConfigError.of("evaluate", got, "data.eval_path", "set it, or eval_every=0")


class DynamicSampling:
    """Fills a batch with prompts whose samples differ in score (DAPO, Yu et al. 2025, eq. 11).

    A prompt whose samples (but those that failed) all have one score has advantages of zero and no
    gradient. Its rows are dropped, and more prompts drawn until num_rows rows are there; rows
    beyond that are dropped too. Reads the column "scores", and waits for it: the number of rows
    depends on data.
    """

    def __init__(self, num_rows: int, cfg: DynamicSamplingConfig) -> None:
        self._num_rows = num_rows
        self._cfg = cfg
        self._kept: list[Batch] = []
        self._num_drawn = 0

    @property
    def is_full(self) -> bool:
        """Whether no further prompts are needed."""
        return self._num_kept >= self._num_rows

    def add(self, drawn: Batch) -> None:
        """Keep the sampled rows of prompts whose scores differ, drop the others; waits for scores.

        Scores of failed rows (nan) are not compared. RowError if this was the last allowed round
        (sampling.max_rounds) and there are still too few rows.
        """
        self._kept.append(drawn.filter_groups("scores", _differ))
        self._num_drawn += len(drawn)
        if len(self._kept) >= self._cfg.max_rounds and not self.is_full:
            got = f"{self._num_kept} rows of prompts whose samples differ in score, among "
            got += f"{self._num_drawn} rows sampled in {len(self._kept)} rounds"
            do = "raise sampling.max_rounds, or choose prompts that the policy solves "
            do += "sometimes but not always"
            raise RowError.of("dynamic sampling", got, self._num_rows, do)

    def batch(self) -> Batch:
        """Return the first num_rows rows that were kept, in the order in which they were sampled.

        RowError if there are fewer.
        """
        if not self.is_full:
            got = f"{self._num_kept} rows"
            do = "call add(...) with further prompts while is_full is false"
            raise RowError.of("DynamicSampling.batch", got, f"{self._num_rows} rows", do)
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
