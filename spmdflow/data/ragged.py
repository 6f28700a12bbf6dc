"""Ragged columns: one jagged nested tensor per column, rows of any length.

A jagged tensor is the pair (values, lengths) that the wire and the store use; `pad` gives the
dense (B, T) for computations. At the end: functions of a TensorDict with such columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor


def ragged(values: Tensor, lengths: Tensor) -> Tensor:
    """Return a jagged tensor of B rows from values (sum of lengths, ...) and lengths (B,) int64.

    It shares memory with values. On the CPU, asserts that the lengths sum to len(values).
    """
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(lengths.to(values.device), 0, out=offsets[1:])
    if values.is_cpu:  # on another device this would make the host wait
        assert int(offsets[-1]) == len(values), (int(offsets[-1]), len(values))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def with_offsets(jagged: Tensor, known: list[Tensor]) -> Tensor:
    """Return the jagged tensor with an equal offsets tensor taken from the list `known`.

    torch adds, multiplies and compares jagged tensors only if they share one tensor of offsets. If
    `known` has no equal one, appends the tensor's own offsets to `known` and returns it unchanged.
    """
    offsets: Tensor = jagged.offsets()  # type: ignore[attr-defined]
    for other in known:
        if torch.equal(other, offsets):
            return torch.nested.nested_tensor_from_jagged(jagged.values(), other)
    known.append(offsets)
    return jagged


def ragged_from_rows(rows: list[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a jagged tensor with copies of the rows (T_i, ...), converted to dtype if it is given.

    An empty list gives 0 rows, float32 unless dtype is given.
    """
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    if rows:
        values = torch.cat(rows)
    else:
        values = torch.zeros(0, dtype=dtype or torch.float32)
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
    """(B, width) bool: True at the first lengths[i] positions of row i."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def pad(jagged: Tensor, *, value: float = 0, width: int | None = None) -> Tensor:
    """Return a dense copy (B, T, ...), filled with `value` on the right.

    T is width (at least the longest row), by default the longest row, or 0 without rows.
    """
    values = jagged.values()
    lengths = lengths_of(jagged)
    if width is None:
        width = int(lengths.max()) if len(lengths) else 0
    padded = values.new_full((len(lengths), width, *values.shape[1:]), value)
    padded[mask_of(lengths, width)] = values
    return padded


def rows_of(jagged: Tensor) -> list[Tensor]:
    """The rows as views, in order."""
    return list(jagged.values().split(lengths_of(jagged).tolist()))


def take_rows(values: Tensor, lengths: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of the rows `index` (n,) int64 of a ragged pair: their values and lengths (n,).

    values: (sum of lengths, ...). index: positions in any order, repeats allowed.
    """
    starts = torch.cumsum(lengths, 0) - lengths
    chosen = lengths[index]
    ends = torch.cumsum(chosen, 0)
    total = int(ends[-1]) if len(ends) else 0
    shift = torch.repeat_interleave(starts[index] - (ends - chosen), chosen)
    return values[torch.arange(total, device=shift.device) + shift], chosen


ROW_WEIGHTS = "row_weights"
"""Column (B,) float32: how much a row counts in baselines and losses. Without it: 1."""
VALID = ("valid", "cost_valid")
"""Dense bool columns: False for a row whose reward or cost function failed. Such a row stays in the
batch, so that the number of rows does not change, but it is in no loss, baseline or metric."""


def valid_rows(batch: TensorDict) -> Tensor | None:
    """Return (B,) bool: False for each row whose reward or cost function failed.

    A row is valid if the columns `valid` and `cost_valid`, as far as the batch has them, are True.
    None if the batch has neither.
    """
    marks = []
    for name in VALID:
        if name in batch.keys():
            marks.append(batch[name].bool())
    if marks:
        return torch.stack(marks).all(0)
    return None


def sampled_mask(batch: TensorDict) -> Tensor:
    """Return (B, R) bool: True at each token that the policy sampled, in rows that did not fail.

    This is response_mask, padded with False to the longest response R, and False in the whole
    row if `valid_rows` is False there.
    """
    mask = pad(batch["response_mask"]).bool()
    valid = valid_rows(batch)
    if valid is None:
        return mask
    return mask & valid[:, None]


def without_failed(batch: TensorDict) -> TensorDict:
    """Return the same rows with response_mask False in failed rows, without the `VALID` columns.

    For a loss: a row without a chosen token is in no sum and in no denominator. Returns the batch
    itself if it has no column of `VALID`; otherwise a new batch, and the given one does not change.
    """
    if valid_rows(batch) is None:
        return batch
    mask = ragged_from_padded(sampled_mask(batch), lengths_of(batch["response_mask"]))
    masked: TensorDict = batch.exclude(*VALID)
    masked["response_mask"] = mask
    return masked


def set_column(batch: TensorDict, name: str, value: Tensor | Sequence[str]) -> None:
    """Store a tensor, a jagged tensor or a list of str under a name."""
    if isinstance(value, Tensor):
        batch[name] = value
    else:
        batch.set_non_tensor(name, list(value))


def select_rows(batch: TensorDict, index: Tensor) -> TensorDict:
    """Return a new TensorDict with the rows `index` (n,) int64, in that order, of every column.

    Copies dense and jagged tensors and lists of str. Repeated positions are allowed.
    """
    chosen = TensorDict({}, batch_size=[len(index)])
    for name in map(str, batch.keys()):
        value = batch[name]
        if not isinstance(value, Tensor):
            set_column(chosen, name, [list(value)[row] for row in index.tolist()])
        elif is_ragged(value):
            rows = take_rows(value.values(), lengths_of(value), index.to(value.device))
            set_column(chosen, name, ragged(*rows))
        else:
            set_column(chosen, name, value[index.to(value.device)])
    return chosen
