"""What a release tells whom: who sends, who receives, and how long the rows are kept."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from spmdflow.controller.result import ColumnFacts, RowResult
from spmdflow.controller.transfers import Transfers
from spmdflow.data.column import ColumnSpec
from spmdflow.errors import TransferError
from spmdflow.runtime.call import Call, OnDone, Pending

ROWS = np.arange(100, 104)
ITEMS = np.array([3, 0, 2, 4])


class KeptCalls:
    """A transport that keeps the calls for the test to answer."""

    world_size = 4
    stop_requested = False

    def __init__(self) -> None:
        self.open: list[Call] = []
        self._pending: list[Pending] = []

    def submit(self, call: Call, on_done: OnDone | None = None) -> Pending:
        self.open.append(call)
        self._pending.append(Pending(call, lambda pending: None, on_done))
        return self._pending[-1]

    def post(self, function: Callable[[], None]) -> None:
        function()

    def node_of(self, rank: int) -> int:
        return 0

    def close(self) -> None:
        """Nothing to end."""

    def answer(self, replies: Mapping[int, Mapping[str, Any]]) -> None:
        self.open.pop(0)
        pending = self._pending.pop(0)
        for rank, reply in replies.items():
            pending.replies[rank] = {"sent": {}, "header_bytes": 0, **reply}
        pending.run_on_done()


def frame_of(freed: list[int], rows: np.ndarray = ROWS, *, held_by: int = 0) -> RowResult:
    """Rows that rank 0 made, a dense column x and a ragged column y, released at once."""
    held = {held_by: rows}
    result = RowResult(7, "a.make", (0,), held, {"x": held, "y": held}, freed.append)
    items = np.resize(ITEMS, len(rows))
    result.facts = {
        "x": ColumnFacts(ColumnSpec("dense", "float32", (2,)), rows, None),
        "y": ColumnFacts(ColumnSpec("ragged", "int64", ()), rows, items),
    }
    result.done = True
    return result


def release(result: RowResult, ids: np.ndarray) -> tuple[KeptCalls, Call]:
    orders = KeptCalls()
    transfers = Transfers(orders, seconds=5)
    transfers.need(result, ["x", "y"], {1: ids}, step=1)
    return orders, orders.open[0]


def test_holder_is_told_to_send_what_the_receiver_is_told_to_await() -> None:
    _, order = release(frame_of([]), ROWS[1:])

    ((source, columns, ids, kinds, lengths),) = order.commands[1]["receives"]
    ((destination, sent_columns, sent_ids),) = order.commands[0]["sends"]
    assert (source, destination) == (0, 1)
    assert columns == sent_columns == ["x", "y"]
    assert ids.tolist() == sent_ids.tolist() == ROWS[1:].tolist()
    assert kinds["x"] == ["dense", "float32", [2]]
    assert lengths["y"].tolist() == ITEMS[1:].tolist()


def test_frame_that_nobody_refers_to_is_freed_after_the_last_sender_replied() -> None:
    freed: list[int] = []
    orders, order = release(frame_of(freed), ROWS)
    num_bytes = 4 * 8 + 9 * 8

    del order
    gc.collect()
    assert freed == []
    orders.answer({0: {"received": {}, "sent": {1: num_bytes}}, 1: {"received": {0: num_bytes}}})

    assert freed == [7]


def test_receiver_that_got_other_bytes_than_planned_is_an_error() -> None:
    orders, _ = release(frame_of([]), ROWS)

    with pytest.raises(TransferError, match=r"received {\(0, 1\): 100}, expected {\(0, 1\): 104}"):
        orders.answer({0: {"received": {}, "sent": {1: 104}}, 1: {"received": {0: 100}}})


def test_holder_that_should_have_sent_but_did_not_is_an_error() -> None:
    orders, _ = release(frame_of([]), ROWS)

    with pytest.raises(TransferError, match=r"sent {}, received {\(0, 1\): 104}"):
        orders.answer({0: {"received": {}}, 1: {"received": {0: 104}}})


def test_rows_that_have_travelled_once_do_not_travel_again() -> None:
    result = frame_of([])
    orders = KeptCalls()
    transfers = Transfers(orders, seconds=5)

    transfers.need(result, ["x"], {1: ROWS[:2]}, step=1)
    transfers.need(result, ["x"], {1: ROWS[:2]}, step=1)
    transfers.need(result, ["x"], {1: ROWS[1:]}, step=1)

    received = [order.commands[1]["receives"] for order in orders.open]
    assert [[edge[2].tolist() for edge in edges] for edges in received] == [
        [[100, 101]],
        [[102, 103]],
    ]
