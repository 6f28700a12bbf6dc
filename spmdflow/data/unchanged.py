"""Whether columns that a method was given are still what they were.

Rows that were returned never change: what is returned is copied once (`column.column_of`), as a
method may return a buffer or a parameter of its own; what is given out is the stored tensor
itself, and a method that writes into it is refused. Refused and not copied, because every method
reads and few would write: copies of all inputs made a round trip of 64 MB twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from spmdflow.data.column import Column
from spmdflow.errors import ColumnError


class Unchanged:
    """Remembers columns and compares.

    Torch counts writes, also those through views. Writes that it does not see (NumPy, `.data`)
    change the sum of the words, unless they only move words about.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[str, Tensor, tuple[int, int]]] = []

    def remember(self, columns: Mapping[str, Column]) -> None:
        """Columns as they are given out; text is given out as a copy and needs no check."""
        for name, column in columns.items():
            if column.kind != "text":
                self._seen.append((name, column.values, _state(column.values)))

    def check(self, label: str) -> None:
        """ColumnError if any of them was written to."""
        for name, values, state in self._seen:
            if _state(values) != state:
                raise ColumnError(
                    f"{label}: wrote into column {name!r} in place, expected it unchanged, as "
                    f"other methods read the same rows; work on batch[{name!r}].clone()"
                )


def _state(values: Tensor) -> tuple[int, int]:
    """The count of writes, and the sum of the 8-byte words and the bytes after them."""
    raw = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    end = len(raw) // 8 * 8  # NumPy sums words that are not aligned, as those of a slice of rows
    return values._version, int(raw[:end].view(np.int64).sum() + raw[end:].sum(dtype=np.int64))
