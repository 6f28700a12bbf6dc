"""Rows over a transport in memory: what arrives, and two ranks that disagree about it."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spmdflow.data.column import Column
from spmdflow.data.store import RowStore
from spmdflow.errors import TransferError
from spmdflow.transfer.lane import CountedTransport, run_release

IDS = np.array([3, 5])
SAME_TAG = 1 << 24
"""Releases that many numbers apart have messages of equal tags."""


class _Arriving:
    """A receive that is done once it is waited for."""

    def __init__(self, target: Tensor, messages: deque[Tensor]) -> None:
        self._target = target
        self._messages = messages

    def wait(self, limit: timedelta) -> bool:
        message = self._messages.popleft()
        size = min(len(message), len(self._target))  # as gloo, which takes a shorter message
        self._target[:size] = message[:size]
        return True


class MemoryTransport(CountedTransport):
    """Both ends of a wire, by tag."""

    def __init__(self) -> None:
        super().__init__(None, seconds=1.0)
        self._messages: dict[int, deque[Tensor]] = {}

    def send(self, tensor: Tensor, destination: int, tag: int, *, header_bytes: int = 0) -> Any:
        self._messages.setdefault(tag, deque()).append(tensor.clone())
        return _Arriving(torch.empty(0, dtype=torch.uint8), deque([tensor]))

    def receive(self, tensor: Tensor, source: int, tag: int, *, header_bytes: int = 0) -> Any:
        return _Arriving(tensor, self._messages[tag])


def dense(dtype: torch.dtype, width: int) -> Column:
    return Column("dense", torch.arange(2 * width).view(2, width).to(dtype))


def sent(columns: dict[str, Column]) -> MemoryTransport:
    """What rank 0 sends as release 7."""
    transport = MemoryTransport()
    store = RowStore()
    store.put(1, IDS, columns)
    command = {"result": 1, "sends": [(1, list(columns), IDS)], "receives": []}
    run_release(7, command, store, transport)
    return transport


def received(number: int, columns: dict[str, Column], transport: MemoryTransport) -> RowStore:
    """What rank 1 has after this release, if it expects columns as these."""
    store = RowStore()
    kinds = {name: column.spec.to_plain() for name, column in columns.items()}
    edge = (0, list(columns), IDS, kinds, {})
    run_release(number, {"result": 1, "sends": [], "receives": [edge]}, store, transport)
    return store


@pytest.mark.parametrize("width", [1, 100_000])
def test_rows_arrive_as_they_were_sent(width: int) -> None:
    columns = {"a": dense(torch.int64, width), "b": dense(torch.float32, 1)}

    store = received(7, columns, sent(columns))

    found = store.take(1, ["a", "b"], IDS)
    assert torch.equal(found["a"].values, columns["a"].values)
    assert torch.equal(found["b"].values, columns["b"].values)


@pytest.mark.parametrize("width", [1, 100_000])
def test_rows_of_another_transfer_are_refused_with_both_numbers(width: int) -> None:
    columns = {"a": dense(torch.int64, width)}
    number = 7 + SAME_TAG

    with pytest.raises(TransferError) as caught:
        received(number, columns, sent(columns))

    size = 2 * 8 * width
    assert f"got [number, bytes...] [7, {size}], expected [{number}, {size}]" in str(caught.value)


def test_columns_of_other_sizes_are_refused_though_the_bytes_are_as_many() -> None:
    columns = {"a": dense(torch.int64, 1), "b": dense(torch.int64, 2)}
    swapped = {"a": columns["b"], "b": columns["a"]}

    with pytest.raises(TransferError) as caught:
        received(7, swapped, sent(columns))

    assert "got [number, bytes...] [7, 16, 32], expected [7, 32, 16]" in str(caught.value)
    assert "the two ranks disagree about the rows" in str(caught.value)
