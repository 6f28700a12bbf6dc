"""Ragged columns: one jagged nested tensor per column, rows of any length.

A jagged tensor is the pair (values, lengths) that the wire and the store use; `pad` gives the
dense (B, T) that the maths uses. Knows no column names and no ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ragged(values: Tensor, lengths: Tensor) -> Tensor:
    """Jagged tensor of B rows from values (sum of lengths, ...) and lengths (B,) int64."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(lengths.to(values.device), 0, out=offsets[1:])
    assert int(offsets[-1]) == len(values), (int(offsets[-1]), len(values))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def with_offsets(jagged: Tensor, known: list[Tensor]) -> Tensor:
    """The same column with offsets of `known` if they are equal; else its own join the list.

    torch adds, multiplies and compares jagged tensors only if they share one tensor of offsets.
    """
    offsets: Tensor = jagged.offsets()  # type: ignore[attr-defined]
    for other in known:
        if torch.equal(other, offsets):
            return torch.nested.nested_tensor_from_jagged(jagged.values(), other)
    known.append(offsets)
    return jagged


def ragged_from_rows(rows: list[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    """Jagged tensor of a list of (T_i, ...) tensors; an empty list needs a dtype."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = torch.cat(rows) if rows else torch.zeros(0, dtype=dtype or torch.float32)
    return ragged(values if dtype is None else values.to(dtype), lengths)


def ragged_from_padded(padded: Tensor, lengths: Tensor) -> Tensor:
    """Jagged tensor of the first lengths[i] entries of each row of (B, T, ...)."""
    return ragged(padded[mask_of(lengths, padded.shape[1])], lengths)


def is_ragged(value: object) -> bool:
    """Whether value is a jagged nested tensor."""
    return isinstance(value, Tensor) and value.is_nested


def lengths_of(jagged: Tensor) -> Tensor:
    """(B,) int64: the length of each row."""
    offsets: Tensor = jagged.offsets()  # type: ignore[attr-defined]
    return offsets.diff()


def mask_of(lengths: Tensor, width: int) -> Tensor:
    """(B, width) bool: True in the first lengths[i] places of row i."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def pad(jagged: Tensor, *, value: float = 0, width: int | None = None) -> Tensor:
    """(B, T, ...) dense copy, filled with value on the right; T = longest row or width."""
    values, lengths = jagged.values(), lengths_of(jagged)
    if width is None:
        width = int(lengths.max()) if len(lengths) else 0
    padded = values.new_full((len(lengths), width, *values.shape[1:]), value)
    padded[mask_of(lengths, width)] = values
    return padded


def rows_of(jagged: Tensor) -> list[Tensor]:
    """The rows as views, in order."""
    return list(jagged.values().split(lengths_of(jagged).tolist()))


def take_rows(values: Tensor, lengths: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Values and lengths of the rows `index` (any order) of a ragged pair."""
    starts = torch.cumsum(lengths, 0) - lengths
    chosen = lengths[index]
    ends = torch.cumsum(chosen, 0)
    total = int(ends[-1]) if len(ends) else 0
    shift = torch.repeat_interleave(starts[index] - (ends - chosen), chosen)
    return values[torch.arange(total, device=shift.device) + shift], chosen
