"""One stored column: dense, ragged or text, cut and joined by rows.

Knows no names and no ranks. On the wire and in the store a column is its values and, unless
dense, its lengths; text is utf-8 bytes.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmdflow.data.ragged import is_ragged, lengths_of, ragged, take_rows
from spmdflow.errors import ColumnError

_HUGE_BYTES = 16 << 20


@dataclass(frozen=True)
class ColumnSpec:
    """What the controller knows of a column: kind, dtype and the shape of one row or item."""

    kind: str
    """dense, ragged or text."""
    dtype: str
    """Name of the torch dtype, such as "float32"."""
    row_shape: tuple[int, ...]
    """Shape of a row (dense) or of an item of a row (ragged, text)."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one row (dense) or one item (ragged, text)."""
        return int(getattr(torch, self.dtype).itemsize * prod(self.row_shape))

    def to_plain(self) -> list[Any]:
        """The spec as message data."""
        return [self.kind, self.dtype, list(self.row_shape)]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> ColumnSpec:
        """The inverse of `to_plain`."""
        return cls(plain[0], plain[1], tuple(plain[2]))


@dataclass(frozen=True)
class Column:
    """Values of some rows. Dense: (B, ...). Ragged and text: (sum of lengths, ...)."""

    kind: str
    values: Tensor
    lengths: Tensor | None = None
    """(B,) int64 for ragged and text."""

    def __len__(self) -> int:
        return len(self.values if self.lengths is None else self.lengths)

    @property
    def spec(self) -> ColumnSpec:
        """Kind, dtype and row shape."""
        dtype = str(self.values.dtype).removeprefix("torch.")
        return ColumnSpec(self.kind, dtype, tuple(self.values.shape[1:]))

    def take(self, index: Tensor) -> Column:
        """Return the rows at the positions `index` (n,) int64, in that order; repeats are allowed.

        The values are a view if the positions are consecutive and ascending, otherwise a copy.
        """
        start = int(index[0]) if len(index) else 0
        stop = start + len(index)
        is_slice = len(index) > 0 and torch.equal(index, torch.arange(start, stop))
        if self.lengths is None:
            return Column(self.kind, self.values[start:stop] if is_slice else self.values[index])
        if not is_slice:
            return Column(self.kind, *take_rows(self.values, self.lengths, index))
        first = int(self.lengths[:start].sum())
        lengths = self.lengths[start:stop]
        return Column(self.kind, self.values[first : first + int(lengths.sum())], lengths)

    def to_value(self) -> Tensor | list[str]:
        """Return the rows as a worker method gets them, in host memory.

        Dense: the tensor (B, ...). Ragged: a jagged tensor of B rows. Both share memory with this
        column. Text: a list of B decoded str.
        """
        if self.kind == "text":
            return _decode(self.values, self.lengths)
        if self.lengths is None:
            return self.values
        return ragged(self.values, self.lengths)


def column_of(name: str, value: Any, num_rows: int) -> Column:
    """Copy what a worker returned for one column into a new `Column` in host memory.

    A tensor becomes a dense column, a jagged tensor a ragged one, a list or tuple of str a text
    column. Any other object with `tolist`, such as a NumPy array of str, is converted to a list
    first. ColumnError for other types, or unless there are exactly num_rows rows.
    """
    if hasattr(value, "tolist") and not isinstance(value, Tensor):
        texts = value.tolist()
    else:
        texts = value
    if is_ragged(value):
        column = Column("ragged", _copy_to_host(value.values()), lengths_of(value).cpu())
    elif isinstance(value, Tensor):
        column = Column("dense", _copy_to_host(value))
    elif isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        column = _encode(texts)
    else:
        expected = "a tensor, a jagged tensor or a list of str"
        do = "convert it before returning"
        raise ColumnError.of(f"column {name!r}", type(value).__name__, expected, do)
    if len(column) != num_rows:
        do = "return one row for each row received, in the same order"
        raise ColumnError.of(f"column {name!r}", f"{len(column)} rows", num_rows, do)
    return column


def _copy_to_host(values: Tensor) -> Tensor:
    """A copy in host memory, so that the worker may go on writing into its tensor."""
    return empty_values(values.shape, values.dtype).copy_(values.detach())


def empty_values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a contiguous, uninitialised tensor of this shape and dtype in host memory.

    A tensor of at least 16 MiB gets huge pages if the kernel has them, because the page faults of
    small pages cost as much as the copy itself.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_BYTES:
        return torch.empty(*shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def _encode(texts: Sequence[str]) -> Column:
    """Return a text column: the UTF-8 bytes of all texts end to end, and (B,) lengths in bytes."""
    parts = [text.encode() for text in texts]
    joined = bytearray(b"".join(parts))
    if joined:
        values = torch.frombuffer(joined, dtype=torch.uint8)
    else:
        values = torch.zeros(0).byte()
    return Column("text", values, torch.tensor([len(part) for part in parts], dtype=torch.int64))


def _decode(values: Tensor, lengths: Tensor | None) -> list[str]:
    """Split the bytes (N,) of a text column by `lengths` (B,); return B decoded str."""
    assert lengths is not None
    raw = values.numpy().tobytes()
    texts = []
    start = 0
    for length in lengths.tolist():
        texts.append(raw[start : start + length].decode())
        start += length
    return texts


def join(columns: Sequence[Column]) -> Column:
    """Return one column with the rows of all columns, in order. All must be of one kind.

    A single column is returned as it is. Otherwise values and lengths are copied.
    """
    if len(columns) == 1:
        return columns[0]
    first = columns[0]
    lengths = None
    if first.lengths is not None:
        lengths = torch.cat([column.lengths for column in columns if column.lengths is not None])
    return Column(first.kind, torch.cat([column.values for column in columns]), lengths)


def to_message(column: Column) -> dict[str, Any]:
    """A column with its values, as message data."""
    raw = column.values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    lengths = None if column.lengths is None else column.lengths.numpy()
    return {"spec": column.spec.to_plain(), "rows": len(column), "lengths": lengths, "bytes": raw}


def read_message(plain: Mapping[str, Any]) -> Column:
    """Rebuild the column from the message data of `to_message`; its tensors are copies."""
    spec = ColumnSpec.from_plain(plain["spec"])
    raw = bytearray(plain["bytes"])
    if raw:
        flat = torch.frombuffer(raw, dtype=torch.uint8)
    else:
        flat = torch.zeros(0, dtype=torch.uint8)
    values = flat.view(getattr(torch, spec.dtype))
    if spec.kind == "dense":
        return Column("dense", values.view(plain["rows"], *spec.row_shape))
    lengths = torch.from_numpy(np.array(plain["lengths"], dtype=np.int64))
    return Column(spec.kind, values.view(int(lengths.sum()), *spec.row_shape), lengths)
