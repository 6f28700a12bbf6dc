"""Files of rows, which rank 0 scans once and every rank then reads by row number.

A scan determines which rows are good, too long or unreadable. `PromptSource` turns row numbers into
columns.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.data_source import DataSource, data_sources
from spmdflow.config.schema import DataSettings
from spmdflow.data.ragged import lengths_of, set_column
from spmdflow.datasets.encode import PromptEncoder, encoder_of, row_of
from spmdflow.datasets.line_file import LineFile
from spmdflow.datasets.tokenizer import load_tokenizer, longest_token
from spmdflow.errors import DataError

logger = logging.getLogger(__name__)

_TOKENISED_AT_A_TIME = 256
_CHARACTERS_AT_A_TIME = 1 << 20
_SHOWN = 5  # bad rows listed in a message


@dataclass(frozen=True)
class ScannedFile(DataSource):
    """Scan results of one source; plain data."""

    num_bytes: int = 0
    """Size of the file, or of a data set's rows as lines. It must be the same on every rank."""
    first: int = 0
    """Number of its first row. The rows of a mixture are numbered across all files.

    A row's number is first + line x data.texts_per_line + the index of its text in the line.
    """


@dataclass(frozen=True)
class ScanReport:
    """Scan results of a file, or of the files of a mixture; plain data."""

    path: str
    num_bytes: int
    """Size of all files."""
    num_rows: int
    """Rows read, blank lines not counted."""
    rows: np.ndarray
    """(n,) int64: numbers of the good rows, ascending."""
    token_lengths: np.ndarray
    """(n,) int32: prompt tokens of each good row, aligned with rows."""
    num_too_long: int
    """Rows skipped because they are longer than data.max_prompt_tokens."""
    longest_tokens: int
    """Tokens of the longest good prompt."""
    bad_rows: list[str]
    """"file:line reason" of each unreadable row."""
    fingerprint: str
    """Hash of the files' content and of the numbers of good rows."""
    files: tuple[ScannedFile, ...] = ()
    """The sources; empty if no file was read (spmdflow.plan)."""
    answer_lengths: np.ndarray | None = None
    """(n,) int32: those of the tokens that belong to answers (`AnswerEncoder.lengths`). None: the
    rows are prompts."""

    def file_of(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """(n,) int64: for each of these row numbers, the index in `files` of its file."""
        first = [file.first for file in self.files]
        return np.searchsorted(first, numbers, side="right") - 1

    def tokens_of(self, numbers: Sequence[int]) -> np.ndarray:
        """(n,) int64: prompt tokens of the good rows with these numbers."""
        indices = np.searchsorted(self.rows, numbers)
        return self.token_lengths[indices].astype(np.int64)

    def answers_of(self, numbers: Sequence[int]) -> np.ndarray:
        """(n,) int64: tokens of the answers of these good rows; 0 for prompts."""
        if self.answer_lengths is None:
            return np.zeros(len(numbers), dtype=np.int64)
        return self.answer_lengths[np.searchsorted(self.rows, numbers)].astype(np.int64)

    def part(self, start: int, stop: int) -> ScanReport:
        """The report with only the good rows start to stop; reports are sent in such parts."""
        answers = self.answer_lengths
        return replace(
            self,
            rows=self.rows[start:stop],
            token_lengths=self.token_lengths[start:stop],
            answer_lengths=None if answers is None else answers[start:stop],
        )

    def describe(self) -> str:
        """Return one line for the log: the path, good rows, longest prompt, and what was skipped.

        For a mixture also each source's rows, and its share of the draws by weight.
        """
        parts = [f"{self.path}: {len(self.rows)} prompts of at most {self.longest_tokens} tokens"]
        if len(self.files) > 1:
            counts = np.bincount(self.file_of(self.rows), minlength=len(self.files)).tolist()
            total_weight = sum(file.weight for file in self.files)
            parts += [
                f"{file.name} {count} (drawn {file.weight / total_weight:.0%})"
                for file, count in zip(self.files, counts, strict=True)
            ]
        if self.num_too_long:
            parts.append(f"{self.num_too_long} too long, skipped")
        if self.bad_rows:
            parts.append(f"{len(self.bad_rows)} unreadable, skipped")
        return ", ".join(parts)


def scan(cfg: DataSettings, setting: object, tokenizer: Any) -> ScanReport:
    """Read, check and tokenise every row once (on rank 0), without storing texts.

    Returns the good rows' numbers and lengths, of all sources one after the other, and logs the bad
    ones. setting: data.train_path or data.eval_path. Any: a transformers tokenizer. Raises
    DataError if a file cannot be read, if more than cfg.max_bad_rows of its rows are unreadable, or
    if no usable row remains.
    """
    return report_of(scan_files(cfg, setting, tokenizer))


def scan_files(cfg: DataSettings, setting: object, tokenizer: Any) -> list[FileScan]:
    """Scan each source of a data setting, in its order; arguments and errors as of `scan`."""
    encoder = encoder_of(tokenizer, cfg)
    passes: list[FileScan] = []
    for source in data_sources("data", str(setting) if isinstance(setting, Path) else setting):
        first = passes[-1].end if passes else 0
        passes.append(FileScan(source, encoder, cfg, first=first, tokenizer=tokenizer))
        passes[-1].run()
    return passes


def report_of(passes: Sequence[FileScan]) -> ScanReport:
    """Return the report of the scans of all sources of a setting."""
    answers = np.concatenate([np.asarray(one.answer_lengths, np.int32) for one in passes])
    return ScanReport(
        path=" + ".join(str(one.file.path) for one in passes),
        num_bytes=sum(one.file.num_bytes for one in passes),
        num_rows=sum(one.num_rows for one in passes),
        rows=np.concatenate([np.asarray(one.rows, np.int64) + one.first for one in passes]),
        token_lengths=np.concatenate([np.asarray(one.token_lengths, np.int32) for one in passes]),
        num_too_long=sum(one.num_too_long for one in passes),
        longest_tokens=max(max(one.token_lengths) for one in passes),
        bad_rows=[bad for one in passes for bad in one.bad_rows()],
        fingerprint="+".join(one.digest.hexdigest() for one in passes),
        files=tuple(
            ScannedFile(**asdict(one.source), num_bytes=one.file.num_bytes, first=one.first)
            for one in passes
        ),
        answer_lengths=answers if answers.any() else None,
    )


def join_reports(parts: Sequence[ScanReport]) -> ScanReport:
    """Join consecutive parts made by `ScanReport.part` to the complete report."""
    answers = [part.answer_lengths for part in parts if part.answer_lengths is not None]
    return replace(
        parts[0],
        rows=np.concatenate([part.rows for part in parts]),
        token_lengths=np.concatenate([part.token_lengths for part in parts]),
        answer_lengths=np.concatenate(answers) if answers else None,
    )


class FileScan:
    """The scan of one file. Lines, and the rows of a line, are counted from 0."""

    def __init__(
        self,
        source: DataSource,
        encoder: PromptEncoder,
        cfg: DataSettings,
        *,
        first: int,
        tokenizer: Any,
    ) -> None:
        """first: the number of its first row. Any: a transformers tokenizer."""
        self.source = source
        self.first = first
        self.file = LineFile(source.location)
        self._encoder = encoder
        self._cfg = cfg
        self._tokenizer = tokenizer
        self.num_lines = self.num_rows = self.num_too_long = 0
        self.digest = blake2b(digest_size=16)
        self.rows: list[int] = []
        self.token_lengths: list[int] = []
        self.answer_lengths: list[int] = []
        self._bad: list[tuple[int, str]] = []
        self._first_too_long: tuple[int, str] | None = None

    def run(self) -> None:
        """Read the file once, fill the fields of this object and log a warning for every bad row.

        The digest covers all lines and the numbers of the good rows. Raises DataError for more than
        max_bad_rows bad rows, or if no usable row remains.
        """
        for texts in self._batches():
            self._measure(texts)
        if len(self._bad) > self._cfg.max_bad_rows:
            raise self._bad_rows_error("")
        for number in self.rows:
            self.digest.update(number.to_bytes(8, "little"))
        for bad in self.bad_rows():
            logger.warning("skipped %s", bad)
        if not self.num_rows:
            got = "an empty file"
            raise DataError.of(self.file.path, got, "at least one prompt", "fill it")
        if not self.rows:
            raise DataError(
                f"{self.file.path}: got no usable prompt in {self.num_rows} rows "
                f"({self.num_too_long} longer than {self._cfg.max_prompt_tokens} tokens, "
                f"{len(self._bad)} unreadable), expected at least one; raise "
                f"data.max_prompt_tokens or fix the file"
            )

    @property
    def end(self) -> int:
        """One more than the number of its last row."""
        return self.first + self.num_lines * self._cfg.texts_per_line

    def bad_rows(self) -> list[str]:
        """Return "FILE:LINE reason" of each unreadable row, by line, counted from 1."""
        result = []
        for line, reason in sorted(self._bad):
            result.append(f"{self.file.path}:{line + 1} {reason}")
        return result

    def first_too_long(self) -> str:
        """Return "FILE:LINE has N tokens" of the first row that is too long; "" without one.

        Of a row that was not tokenised, it says how many characters it has.
        """
        if self._first_too_long is None:
            return ""
        number, size = self._first_too_long
        return f"{self.file.path}:{number // self._cfg.texts_per_line + 1} has {size}"

    @cached_property
    def _most_characters(self) -> float:
        """Number of characters above which a text has more than max_prompt_tokens tokens.

        Infinite if a token of this tokenizer can stand for any number of characters.
        """
        longest = longest_token(self._tokenizer)
        if longest is None:
            return inf
        return self._cfg.max_prompt_tokens * longest

    def _batches(self) -> Iterator[list[tuple[int, Any]]]:
        """Yield batches of (number, text) to tokenise together, of at most 256 texts.

        A batch also ends once it has more than 2**20 characters. Texts that have too many
        characters for max_prompt_tokens are counted as too long and not tokenised.
        """
        batch: list[tuple[int, Any]] = []
        num_characters = 0
        for number, text in self._texts():
            size = self._encoder.num_characters(text)
            # only for long texts: _most_characters reads the complete vocabulary
            if size > self._cfg.max_prompt_tokens and size > self._most_characters:
                self._add_too_long(number, f"{size} characters")
                continue
            batch.append((number, text))
            num_characters += size
            if len(batch) == _TOKENISED_AT_A_TIME or num_characters > _CHARACTERS_AT_A_TIME:
                yield batch
                batch = []
                num_characters = 0
        if batch:
            yield batch

    def _texts(self) -> Iterator[tuple[int, Any]]:
        """Yield (number, text) of each readable row; numbers start at 0 in this file.

        Blank lines are skipped, unreadable ones recorded as bad rows. Every line goes into the
        digest.
        """
        for number, line in enumerate(self.file.lines()):
            self.digest.update(line)
            self.num_lines = number + 1
            if not line.strip():
                continue
            try:
                texts = self._texts_in(line)
            except DataError as err:
                self.num_rows += 1
                self._add_bad_row(number, str(err))
                continue
            self.num_rows += len(texts)
            start = number * self._cfg.texts_per_line
            yield from enumerate(texts, start)

    def _texts_in(self, line: bytes) -> list[Any]:
        """Return the texts of a line, one per batch row; DataError if one cannot be used."""
        row = row_of(line, self.source)
        result = []
        for each in range(self._encoder.num_texts(row)):
            result.append(self._encoder.text(row, each))
        return result

    def _measure(self, texts: list[tuple[int, Any]]) -> None:
        """Tokenise texts and record each: good with its length, too long, or bad (no tokens)."""
        lengths = self._encoder.lengths([text for _, text in texts])
        for (number, _), (num_tokens, answered) in zip(texts, lengths, strict=True):
            if not num_tokens:
                column = self._cfg.prompt_column or self._cfg.answer_columns[0]
                line = number // self._cfg.texts_per_line
                self._add_bad_row(line, f"has no tokens in {column!r}")
            elif num_tokens > self._cfg.max_prompt_tokens:
                self._add_too_long(number, f"{num_tokens} tokens")
            else:
                self.rows.append(number)
                self.token_lengths.append(num_tokens)
                self.answer_lengths.append(answered)

    def _add_too_long(self, number: int, size: str) -> None:
        """Count a row that is too long. size: its tokens, or its characters if not tokenised."""
        self.num_too_long += 1
        # texts with too many characters are found before earlier ones are tokenised
        if self._first_too_long is None or number < self._first_too_long[0]:
            self._first_too_long = (number, size)

    def _add_bad_row(self, line: int, reason: str) -> None:
        self._bad.append((line, reason))
        if len(self._bad) >= self._cfg.max_bad_rows + _SHOWN:  # enough to report: stop reading
            raise self._bad_rows_error("at least ")

    def _bad_rows_error(self, prefix: str) -> DataError:
        """Return the DataError for too many bad rows, which lists the first five.

        prefix: words before their number, such as "at least ".
        """
        lines = self.bad_rows()[:_SHOWN]
        more = len(self._bad) - _SHOWN
        lines += [f"... and {more} more"] if more > 0 else []
        return DataError(
            f"{self.file.path}: got {prefix}{len(self._bad)} unreadable rows, expected at most "
            f"{self._cfg.max_bad_rows} (data.max_bad_rows); fix or remove them, correct "
            f"data.prompt_column, or raise data.max_bad_rows\n  " + "\n  ".join(lines)
        )


class PromptSource:
    """Reads rows of scanned files by number. Safe to use from two threads."""

    def __init__(self, files: Sequence[ScannedFile], data: DataSettings) -> None:
        """Raises DataError if a file on this node is not as long as the one that was scanned."""
        self._files = [(facts, LineFile(facts.location)) for facts in files]
        for facts, file in self._files:
            if file.num_bytes != facts.num_bytes:
                raise DataError(
                    f"{facts.location}: got a file of {file.num_bytes} bytes, expected the "
                    f"{facts.num_bytes} bytes that rank 0 scanned; give every node the same file"
                )
        self._max_prompt_tokens = data.max_prompt_tokens
        self._texts_per_line = data.texts_per_line
        self._encoder = encoder_of(load_tokenizer(data.tokenizer_path), data)

    def read_rows(self, numbers: Sequence[int]) -> TensorDict:
        """Read the rows with these numbers from the files and encode them, in this order.

        The columns are `prompts` (ragged int64), `row` (the other fields as JSON) and those of this
        kind of rows (`encode`). Raises DataError if the file has changed since the scan, so that a
        row cannot be read, is empty or is too long.
        """
        rows = [self._row(number) for number in numbers]
        columns = self._encoder.columns([text for text, _ in rows])
        prompts = columns["prompts"]
        assert isinstance(prompts, Tensor), type(prompts)
        for number, length in zip(numbers, lengths_of(prompts).tolist()):
            if not 0 < length <= self._max_prompt_tokens:
                raise self._change_error(number, f"has {length} tokens")
        batch = TensorDict({}, batch_size=[len(numbers)])
        for name, column in (columns | {"row": [others for _, others in rows]}).items():
            set_column(batch, name, column)
        return batch

    def _row(self, number: int) -> tuple[Any, str]:
        """Return the encoder's text of a row, and the row's other fields as JSON.

        DataError if the line can no longer be encoded, as the file has changed since the scan.
        """
        facts, file = self._file_of(number)
        line_number, text_number = divmod(number - facts.first, self._texts_per_line)
        (line,) = file.read([line_number])
        try:
            row = row_of(line, facts)
            return self._encoder.text(row, text_number), self._encoder.other_fields(row)
        except DataError as err:
            raise self._change_error(number, str(err)) from err

    def _file_of(self, number: int) -> tuple[ScannedFile, LineFile]:
        return self._files[bisect_right(self._files, number, key=lambda item: item[0].first) - 1]

    def _change_error(self, number: int, what: str) -> DataError:
        facts, file = self._file_of(number)
        line = (number - facts.first) // self._texts_per_line
        return DataError(
            f"{file.path}:{line + 1} {what}; expected the good row that rank "
            f"0 scanned; leave the file as it is during a run, and give every node the same one"
        )
