"""What a rank needs to turn row numbers into columns; made on each rank from plain settings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import DataSettings
from spmdflow.data.ragged import lengths_of, set_column
from spmdflow.datasets.encode import fields_of, rename_fields
from spmdflow.datasets.examples import encoder_of
from spmdflow.datasets.line_file import LineFile
from spmdflow.datasets.scan import ScannedFile
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import DataError


class PromptSource:
    """Rows of scanned files by number. Safe to use from two threads."""

    def __init__(self, files: Sequence[ScannedFile], data: DataSettings) -> None:
        """DataError if a file here is not as long as the one that was scanned."""
        self._files = [(facts, _open(facts)) for facts in files]
        self._firsts = [facts.first for facts in files]
        self._max_prompt_tokens = data.max_prompt_tokens
        self._encoder = encoder_of(load_tokenizer(data.tokenizer_path), data)

    def read_rows(self, numbers: Sequence[int]) -> TensorDict:
        """`prompts` (ragged int64), `row` (text) and the kind's other columns, in this order.

        DataError if a row is not what the scan saw: the file has changed.
        """
        rows = [self._row(number) for number in numbers]
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

    def _row(self, number: int) -> tuple[Any, str]:
        """The encoder's text and the other fields."""
        facts, file = self._files[bisect_right(self._firsts, number) - 1]
        (line,) = file.read([number - facts.first])
        try:
            row = rename_fields(fields_of(line), facts.columns, facts.name)
            return self._encoder.text(row), self._encoder.other_fields(row)
        except DataError as err:
            raise self._changed(number, str(err)) from err

    def _changed(self, number: int, what: str) -> DataError:
        facts, file = self._files[bisect_right(self._firsts, number) - 1]
        return DataError(
            f"{file.path}:{number - facts.first + 1} {what}; expected the good row that rank "
            f"0 scanned; leave the file as it is during a run, and give every node the same one"
        )


def _open(facts: ScannedFile) -> LineFile:
    file = LineFile(facts.place)
    if file.num_bytes != facts.num_bytes:
        raise DataError(
            f"{facts.place}: got a file of {file.num_bytes} bytes, expected the {facts.num_bytes} "
            f"bytes that rank 0 scanned; give every node the same file"
        )
    return file
