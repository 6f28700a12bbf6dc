"""What a rank needs to turn row numbers into columns; made on each rank from plain settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import DataConfig
from spmdflow.data.ragged import lengths_of
from spmdflow.data.rows import set_column
from spmdflow.datasets.encode import fields_of
from spmdflow.datasets.kind import encoder_of
from spmdflow.datasets.line_file import LineFile
from spmdflow.datasets.scan import ScanReport
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import DataError


def source_settings(cfg: DataConfig, report: ScanReport) -> dict[str, Any]:
    """Arguments of `PromptSource` for a scanned file, as message data."""
    return {
        "path": report.path,
        "rows": cfg.rows,
        "prompt_column": cfg.prompt_column,
        "answer_columns": cfg.answer_columns,
        "chat_template": cfg.chat_template,
        "prompt_end": cfg.prompt_end,
        "tokenizer_path": cfg.tokenizer_path,
        "max_prompt_tokens": cfg.max_prompt_tokens,
        "num_bytes": report.num_bytes,
    }


class PromptSource:
    """Rows of a scanned file by number. Safe to use from two threads."""

    def __init__(
        self,
        path: str,
        *,
        prompt_column: str | None,
        chat_template: bool,
        tokenizer_path: str,
        max_prompt_tokens: int,
        num_bytes: int | None = None,
        rows: str = "prompts",
        answer_columns: Sequence[str] = (),
        prompt_end: str = "",
    ) -> None:
        """DataError if the file here is not num_bytes long: not the file that was scanned."""
        self._file = LineFile(path)
        if num_bytes is not None and self._file.num_bytes != num_bytes:
            raise DataError(
                f"{path}: got a file of {self._file.num_bytes} bytes, expected the {num_bytes} "
                f"bytes that rank 0 scanned; give every node the same file"
            )
        self._max_prompt_tokens = max_prompt_tokens
        self._encoder = encoder_of(
            load_tokenizer(tokenizer_path),
            rows=rows,
            column=prompt_column,
            answers=answer_columns,
            chat_template=chat_template,
            prompt_end=prompt_end,
        )

    def read_rows(self, numbers: Sequence[int]) -> TensorDict:
        """`prompts` (ragged int64), `row` (text) and the kind's other columns, in this order.

        DataError if a row is not what the scan saw: the file has changed.
        """
        rows = [self._row(n, line) for n, line in zip(numbers, self._file.read(numbers))]
        texts = [text for text, _ in rows]
        columns = self._encoder.columns(texts)
        prompts = columns["prompts"]
        assert isinstance(prompts, Tensor), type(prompts)
        for number, length in zip(numbers, lengths_of(prompts).tolist()):
            if not 0 < length <= self._max_prompt_tokens:
                raise self._changed(number, f"has {length} tokens")
        batch = TensorDict({}, batch_size=[len(numbers)])
        for name, column in columns.items():
            set_column(batch, name, column)
        set_column(batch, "row", [others for _, others in rows])
        return batch

    def _row(self, number: int, line: bytes) -> tuple[Any, str]:
        """The encoder's text and the other fields."""
        try:
            row = fields_of(line)
            return self._encoder.text(row), self._encoder.other_fields(row)
        except DataError as err:
            raise self._changed(number, str(err)) from err

    def _changed(self, number: int, what: str) -> DataError:
        return DataError(
            f"{self._file.path}:{number + 1} {what}; expected the good row that rank 0 scanned; "
            f"leave the file as it is during a run, and give every node the same one"
        )
