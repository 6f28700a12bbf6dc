"""One pass over a file of prompts: which rows are good, which too long, which unreadable."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from spmdflow.config.data_source import DataSource, data_sources
from spmdflow.config.schema import DataSettings
from spmdflow.datasets.encode import RowEncoder, fields_of, rename_fields
from spmdflow.datasets.examples import encoder_of
from spmdflow.datasets.line_file import LineFile
from spmdflow.errors import DataError

logger = logging.getLogger(__name__)

_TOKENISED_AT_A_TIME = 256
_SHOWN = 5  # bad rows named in a message


@dataclass(frozen=True)
class ScannedFile(DataSource):
    """Facts of one source of a mixture, or of the only one; plain data."""

    num_bytes: int = 0
    """Size of the file on disk, or of a data set's rows; an error on a rank that sees another."""
    first: int = 0
    """The number that its first line has in the mixture."""


@dataclass(frozen=True)
class ScanReport:
    """Facts of a file, or of a mixture's files, under given settings; plain data."""

    path: str
    num_bytes: int
    """Size of all files."""
    num_rows: int
    """Rows read, blank lines not counted."""
    rows: list[int]
    """Numbers of the good rows, ascending."""
    token_lengths: list[int]
    """Prompt tokens of each good row, aligned with rows."""
    num_too_long: int
    """Rows left out because they are longer than data.max_prompt_tokens."""
    longest_tokens: int
    """Tokens of the longest good prompt."""
    bad_rows: list[str]
    """"file:line reason" of each unreadable row."""
    fingerprint: str
    """Changes with the file's content and with the set of good rows."""
    files: tuple[ScannedFile, ...] = ()
    """The sources; none of a file that was not read (spmdflow.plan)."""

    def file_of(self, numbers: Sequence[int]) -> np.ndarray:
        """(n,) int64: which of the files has each of the rows `numbers`."""
        first = [file.first for file in self.files]
        return np.searchsorted(first, numbers, side="right") - 1

    def tokens_of(self, numbers: Sequence[int]) -> np.ndarray:
        """(n,) int64: prompt tokens of the good rows `numbers`."""
        places = np.searchsorted(self.rows, numbers)
        return np.asarray(self.token_lengths, dtype=np.int64)[places]

    def describe(self) -> str:
        """One line for the log."""
        parts = [f"{self.path}: {len(self.rows)} prompts of at most {self.longest_tokens} tokens"]
        if len(self.files) > 1:
            counts = np.bincount(self.file_of(self.rows), minlength=len(self.files)).tolist()
            whole = sum(file.weight for file in self.files)
            parts += [
                f"{file.name} {count} (drawn {file.weight / whole:.0%})"
                for file, count in zip(self.files, counts, strict=True)
            ]
        if self.num_too_long:
            parts.append(f"{self.num_too_long} too long, left out")
        if self.bad_rows:
            parts.append(f"{len(self.bad_rows)} unreadable, skipped")
        return ", ".join(parts)


def scan(cfg: DataSettings, setting: object, tokenizer: Any) -> ScanReport:
    """Read, check and tokenise every row once (rank 0); texts are not kept.

    setting: data.train_path or data.eval_path. Any: a transformers tokenizer. DataError if a file
    cannot be read, if more than cfg.max_bad_rows of its rows are unreadable, or if none is left.
    """
    encoder = encoder_of(tokenizer, cfg)
    reports: list[ScanReport] = []
    first = 0
    for source in data_sources("data", str(setting) if isinstance(setting, Path) else setting):
        one = _Pass(source, encoder, cfg, first)
        report = one.run()
        for bad in report.bad_rows:
            logger.warning("skipped %s", bad)
        if not report.rows:
            raise DataError(_nothing_left(report, cfg))
        reports.append(report)
        first += one.num_lines
    return reports[0] if len(reports) == 1 else _mixture(reports)


def _mixture(reports: Sequence[ScanReport]) -> ScanReport:
    """Facts of several files as those of one; their rows are numbered on."""
    return ScanReport(
        path=" + ".join(report.path for report in reports),
        num_bytes=sum(report.num_bytes for report in reports),
        num_rows=sum(report.num_rows for report in reports),
        rows=[number for report in reports for number in report.rows],
        token_lengths=[length for report in reports for length in report.token_lengths],
        num_too_long=sum(report.num_too_long for report in reports),
        longest_tokens=max(report.longest_tokens for report in reports),
        bad_rows=[bad for report in reports for bad in report.bad_rows],
        fingerprint="+".join(report.fingerprint for report in reports),
        files=tuple(file for report in reports for file in report.files),
    )


class _Pass:
    """The state of one scan."""

    def __init__(
        self, source: DataSource, encoder: RowEncoder, cfg: DataSettings, first: int
    ) -> None:
        """first: the number of its first line."""
        self._source, self._first = source, first
        self._file, self._encoder, self._cfg = LineFile(source.place), encoder, cfg
        self.num_lines = 0
        self._digest = blake2b(digest_size=16)
        self._num_rows = self._num_too_long = self._longest = 0
        self._rows: list[int] = []
        self._token_lengths: list[int] = []
        self._bad: list[tuple[int, str]] = []

    def run(self) -> ScanReport:
        """Read the file once; DataError beyond the bad rows that are tolerated."""
        waiting: list[tuple[int, Any]] = []
        for number, text in self._texts():
            waiting.append((number, text))
            if len(waiting) == _TOKENISED_AT_A_TIME:
                self._measure(waiting)
                waiting = []
        self._measure(waiting)
        if len(self._bad) > self._cfg.max_bad_rows:
            self._refuse(at_least=False)
        return self._report()

    def _report(self) -> ScanReport:
        for number in self._rows:
            self._digest.update(number.to_bytes(8, "little"))
        return ScanReport(
            path=str(self._file.path),
            num_bytes=self._file.num_bytes,
            num_rows=self._num_rows,
            rows=[self._first + number for number in self._rows],
            token_lengths=self._token_lengths,
            num_too_long=self._num_too_long,
            longest_tokens=self._longest,
            bad_rows=self._bad_rows(),
            fingerprint=self._digest.hexdigest(),
            files=(
                ScannedFile(
                    **asdict(self._source), num_bytes=self._file.num_bytes, first=self._first
                ),
            ),
        )

    def _texts(self) -> Iterator[tuple[int, Any]]:
        """Number and prompt of each readable row."""
        for number, line in enumerate(self._file.lines()):
            self._digest.update(line)
            self.num_lines = number + 1
            if not line.strip():
                continue
            self._num_rows += 1
            try:
                row = rename_fields(fields_of(line), self._source.columns, self._source.name)
                yield number, self._encoder.text(row)
            except DataError as err:
                self._note(number, str(err))

    def _measure(self, texts: list[tuple[int, Any]]) -> None:
        all_ids = self._encoder.ids([text for _, text in texts])
        for (number, _), ids in zip(texts, all_ids):
            if not ids:
                column = self._cfg.prompt_column or self._cfg.answer_columns[0]
                self._note(number, f"has no tokens in {column!r}")
            elif len(ids) > self._cfg.max_prompt_tokens:
                self._num_too_long += 1
            else:
                self._rows.append(number)
                self._token_lengths.append(len(ids))
                self._longest = max(self._longest, len(ids))

    def _note(self, number: int, reason: str) -> None:
        self._bad.append((number, reason))
        if len(self._bad) >= self._cfg.max_bad_rows + _SHOWN:  # enough to show: read no further
            self._refuse(at_least=True)

    def _refuse(self, *, at_least: bool) -> None:
        limit = self._cfg.max_bad_rows
        shown = self._bad_rows()[:_SHOWN]
        more = len(self._bad) - len(shown)
        lines = [*shown, f"... and {more} more"] if more else shown
        raise DataError(
            f"{self._file.path}: got {'at least ' * at_least}{len(self._bad)} unreadable rows, "
            f"expected at most {limit} (data.max_bad_rows); fix or remove them, correct "
            f"data.prompt_column, or raise data.max_bad_rows\n  " + "\n  ".join(lines)
        )

    def _bad_rows(self) -> list[str]:
        return [f"{self._file.path}:{number + 1} {reason}" for number, reason in sorted(self._bad)]


def _nothing_left(report: ScanReport, cfg: DataSettings) -> str:
    if not report.num_rows:
        return f"{report.path}: got an empty file, expected at least one prompt; fill it"
    return (
        f"{report.path}: got no usable prompt in {report.num_rows} rows ({report.num_too_long} "
        f"longer than {cfg.max_prompt_tokens} tokens, {len(report.bad_rows)} unreadable), "
        f"expected at least one; raise data.max_prompt_tokens or fix the file"
    )
