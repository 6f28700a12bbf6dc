"""Cuts and joins the rows of a TensorDict that may hold ragged and text columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.column import column_of
from spmdflow.data.ragged import (
    is_ragged,
    lengths_of,
    pad,
    ragged,
    ragged_from_padded,
    take_rows,
)


def select_rows(batch: TensorDict, index: Tensor) -> TensorDict:
    """The rows `index` (int64, any order) of every column."""
    chosen = TensorDict({}, batch_size=[len(index)])
    for name in names_of(batch):
        set_column(chosen, name, _select(name, batch[name], index, batch.batch_size[0]))
    return chosen


VALID = ("valid", "cost_valid")
"""Dense bool columns: False on a row that failed (its reward function did), which is kept so that
the number of rows stays as planned, but counts nowhere."""


def valid_rows(batch: TensorDict) -> Tensor | None:
    """(B,) bool: the rows that count, in host memory; None if the batch does not say."""
    marks = [batch[name].bool() for name in VALID if name in batch.keys()]
    return torch.stack(marks).all(0) if marks else None


def chosen_mask(batch: TensorDict) -> Tensor:
    """(B, R) bool: response_mask, padded, and False on every token of a row that failed."""
    mask, valid = pad(batch["response_mask"]).bool(), valid_rows(batch)
    return mask if valid is None else mask & valid[:, None]


def without_failed(batch: TensorDict) -> TensorDict:
    """The same rows with response_mask as `chosen_mask` has it and no column of `VALID`.

    For a loss: a row without a chosen token is in no sum and in no denominator.
    """
    if valid_rows(batch) is None:
        return batch
    mask = ragged_from_padded(chosen_mask(batch), lengths_of(batch["response_mask"]))
    kept: TensorDict = batch.exclude(*VALID)
    kept["response_mask"] = mask
    return kept


def names_of(batch: TensorDict) -> list[str]:
    """Names of the columns, in order."""
    return [str(name) for name in batch.keys()]


def set_column(batch: TensorDict, name: str, value: Tensor | Sequence[str]) -> None:
    """Store a tensor, a jagged tensor or a list of str under a name."""
    if isinstance(value, Tensor):
        batch[name] = value
    else:
        batch.set_non_tensor(name, list(value))


def _select(name: str, value: object, index: Tensor, num_rows: int) -> Tensor | list[str]:
    if is_ragged(value):
        assert isinstance(value, Tensor)
        on_device = index.to(value.device)
        return ragged(*take_rows(value.values(), lengths_of(value), on_device))
    if isinstance(value, Tensor):
        return value[index.to(value.device)]
    taken = column_of(name, value, num_rows).take(index).to_value()
    assert isinstance(taken, list)
    return taken


def total_length(jagged: Tensor) -> int:
    """Items of all rows of a jagged tensor."""
    return int(lengths_of(jagged).sum())


def token_lengths(batch: TensorDict) -> list[int]:
    """Prompt + response tokens of each row."""
    lengths = torch.zeros(batch.batch_size[0], dtype=torch.int64)
    for name in ("prompts", "responses"):
        if name in batch.keys():
            lengths += lengths_of(batch[name]).cpu()
    return lengths.tolist()
