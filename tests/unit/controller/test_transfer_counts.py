"""What the io thread notes of transfers is read by the script whole, and as a copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from spmdflow.controller.transfers import Transfers
from tests.unit.controller.test_release import ROWS, KeptCalls, frame_of
from tests.unit.interleaving import EveryOrder, ScheduledLock, Scheduler

ROW_BYTES = 2 * 4
EARLIER = {(3, 4): 1}
"""Bytes of transfers before: a counter without any would take over others in one step."""


class PostedCalls(KeptCalls):
    """A transport whose posted functions are run by the test, as the io thread would."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[Callable[[], None]] = []

    def post(self, function: Callable[[], None]) -> None:
        self.posted.append(function)

    def run_posted(self) -> None:
        for function in self.posted:
            function()


class InterruptedList(list[Any]):
    """A list to which another thread may do something before `append` does its work."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def append(self, item: Any) -> None:
        self._scheduler.pause()
        super().append(item)


class InterruptedCounter(Counter[Any]):
    """A counter that another thread may read before each of its numbers is changed."""

    scheduler: Scheduler

    def __setitem__(self, key: Any, number: int) -> None:
        self.scheduler.pause()
        super().__setitem__(key, number)


def transfers_in_turns(scheduler: Scheduler, orders: KeptCalls) -> Transfers:
    """Transfers whose threads take turns at every place where one could interrupt the other."""
    scheduler.shared = lambda: tuple(scheduler.trace)  # no order is left out
    transfers = Transfers(orders, seconds=1.0)
    transfers._lock = ScheduledLock(scheduler)  # type: ignore[assignment]
    transfers._outstanding = InterruptedList(scheduler)
    transfers._planned = InterruptedCounter(EARLIER)
    transfers._planned.scheduler = scheduler
    return transfers


def test_counts_that_the_script_was_given_do_not_change_with_later_releases() -> None:
    orders = KeptCalls()
    transfers = Transfers(orders, seconds=1.0)
    before = transfers.planned_bytes

    transfers.need(frame_of([]), ["x"], {1: ROWS}, step=1)

    assert before == {}
    assert transfers.planned_bytes == {(0, 1): len(ROWS) * ROW_BYTES}


def test_transfer_released_while_the_script_takes_the_outstanding_ones_is_waited_for() -> None:
    waited_for: list[list[str]] = []

    def program(scheduler: Scheduler) -> None:
        orders = PostedCalls()
        taken = []
        transfers = transfers_in_turns(scheduler, orders)
        transfers.need(frame_of([]), ["x"], {1: ROWS}, step=1)

        def end_step() -> None:
            taken.extend(record.label for record in transfers.take_outstanding())

        scheduler.add("io", orders.run_posted)
        scheduler.add("script", end_step)
        scheduler.run()
        end_step()  # of the next step
        waited_for.append(taken)

    assert len(list(EveryOrder(program))) > 2
    assert all(taken == ["transfer 1 of a.make"] for taken in waited_for)


def test_bytes_that_the_script_reads_are_those_of_whole_transfers() -> None:
    found: list[dict[Any, int]] = []

    def program(scheduler: Scheduler) -> None:
        orders = PostedCalls()
        transfers = transfers_in_turns(scheduler, orders)
        transfers.need(frame_of([]), ["x"], {1: ROWS[:1], 2: ROWS[1:]}, step=1)
        scheduler.add("io", orders.run_posted)
        scheduler.add("script", lambda: found.append(dict(transfers.planned_bytes)))
        scheduler.run()

    assert len(list(EveryOrder(program))) > 2
    after = EARLIER | {(0, 1): ROW_BYTES, (0, 2): 3 * ROW_BYTES}
    assert all(counted in (EARLIER, after) for counted in found)
    assert EARLIER in found
    assert after in found
