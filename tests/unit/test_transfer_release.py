"""What a release tells whom: who reads, who sends, and how long the rows are kept."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from spmdflow.controller.frame import ColumnFacts, Frame
from spmdflow.controller.transfers import Transfers
from spmdflow.data.column import ColumnSpec
from spmdflow.errors import TransferError
from spmdflow.runtime.order import Order, Pending

ROWS = np.arange(100, 104)
ITEMS = np.array([3, 0, 2, 4])


class Orders:
    """A transport that keeps the orders for the test to answer."""

    world_size, stop_requested = 4, False

    def __init__(self) -> None:
        self.open: list[Order] = []

    def submit(self, order: Order) -> Pending:
        self.open.append(order)
        return Pending(order.label, lambda pending: None)

    def post(self, function: Callable[[], None]) -> None:
        function()

    def node_of(self, rank: int) -> int:
        return 0

    def close(self) -> None:
        """Nothing to end."""

    def answer(self, replies: Mapping[int, Mapping[str, Any]]) -> None:
        on_done = self.open.pop(0).on_done
        assert on_done is not None
        on_done({rank: {"sent": {}, "header_bytes": 0, **r} for rank, r in replies.items()})


def frame_of(freed: list[int], rows: np.ndarray = ROWS, *, held_by: int = 0) -> Frame:
    """Rows that rank 0 made, a dense column x and a ragged column y, released at once."""
    held = {held_by: rows}
    frame = Frame(
        7, "a.make", (0,), ("x", "y"), held, {"x": held, "y": held}, freed.append, {0: rows}
    )
    items = np.resize(ITEMS, len(rows))
    frame.facts = {
        "x": ColumnFacts(ColumnSpec("dense", "float32", (2,)), rows, None),
        "y": ColumnFacts(ColumnSpec("ragged", "int64", ()), rows, items),
    }
    frame.places = {0: {"x": (1000, 10), "y": (2000, 20)}}
    frame.done = True
    return frame


def release(frame: Frame, ids: np.ndarray, *, readable: bool = True) -> tuple[Orders, Order]:
    orders = Orders()
    transfers = Transfers(orders, seconds=5, readable={1: {0}} if readable else {})
    transfers.need(frame, ["x", "y"], {1: ids})
    return orders, orders.open[0]


def test_readable_rows_are_read_by_the_receiver_and_the_holder_hears_nothing() -> None:
    _, order = release(frame_of([]), ROWS[1:])

    (edge,) = order.commands[1]["receives"]
    x, y = edge[5]["x"], edge[5]["y"]
    assert set(order.commands) == {1}
    assert (x[:2], x[2].tolist()) == ([1000, 10], [[8, 24]])
    assert (y[:2], y[2].tolist()) == ([2000, 20], [[24, 48]])
    assert order.commands[1]["precedes_call"]
    assert order.rides


@pytest.mark.parametrize("why", ["not readable", "not made there", "no place", "too scattered"])
def test_all_other_rows_are_sent_by_their_holder(why: str) -> None:
    rows = np.arange(3000) if why == "too scattered" else ROWS
    frame = frame_of([], rows)
    if why == "not made there":
        frame.made = {0: ROWS[:1]}
    if why == "no place":
        frame.places = {0: {"x": (1000, 10)}}

    _, order = release(frame, rows[::2], readable=why != "not readable")

    (edge,) = order.commands[1]["receives"]
    ((destination, columns, ids),) = order.commands[0]["sends"]
    assert edge[5] is None
    assert (destination, columns, ids.tolist()) == (1, ["x", "y"], rows[::2].tolist())
    assert order.commands[1]["precedes_call"]
    assert not order.commands[0]["precedes_call"]
    assert not order.rides


def test_frame_that_nobody_refers_to_is_freed_after_the_last_reader_replied() -> None:
    freed: list[int] = []
    orders, order = release(frame_of(freed), ROWS)
    num_bytes = 4 * 8 + 9 * 8

    del order
    gc.collect()
    assert freed == []
    orders.answer({1: {"received": {0: num_bytes}}})

    assert freed == [7]


def test_reader_that_copied_other_bytes_than_planned_is_an_error() -> None:
    orders, _ = release(frame_of([]), ROWS)

    with pytest.raises(TransferError, match=r"received {\(0, 1\): 100}, expected {\(0, 1\): 104}"):
        orders.answer({1: {"received": {0: 100}}})


def test_holder_that_should_have_sent_but_did_not_is_an_error() -> None:
    orders, _ = release(frame_of([]), ROWS, readable=False)

    with pytest.raises(TransferError, match=r"sent {}, received {\(0, 1\): 104}"):
        orders.answer({0: {"received": {}}, 1: {"received": {0: 104}}})
