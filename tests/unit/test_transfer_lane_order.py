"""The transfer lane, run by two threads: in order, one at a time, each what it may run."""

from __future__ import annotations

import threading
import time
from typing import Any

from spmdflow.runtime.executor import TRANSFER, Command, SharedLane
from spmdflow.runtime.failure import Failure


class Told:
    """What a lane said, in order: ticket, thread, and whether the answer may ride."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str, bool]] = []
        self.ended = threading.Event()

    def reply(self, ticket: int, payload: dict[str, Any], *, rides: bool = False) -> None:
        self.answers.append((ticket, payload["thread"], rides))

    def fail(self, failure: Failure) -> None:
        raise AssertionError(failure.sentence())

    def lane_ended(self, name: str) -> None:
        self.ended.set()


def lane_of(told: Told) -> tuple[SharedLane, threading.Thread]:
    lane = SharedLane(TRANSFER, 0, told)
    running: list[int] = []

    def move(payload: dict[str, Any], number: int) -> dict[str, Any]:
        assert not running, "two transfers at a time"
        running.append(number)
        time.sleep(payload["seconds"])
        running.remove(number)
        return {"thread": threading.current_thread().name}

    lane.operations = {"move": move}
    own = threading.Thread(target=lane.run_own_thread, name="own")
    own.start()
    return lane, own


def command(number: int, *, seconds: float = 0.0) -> Command:
    payload = {"operation": "move", "seconds": seconds}
    return Command(number, number, TRANSFER, "transfer", 5.0, payload)


def end(lane: SharedLane, own: threading.Thread, told: Told) -> None:
    lane.wake(end=True)
    assert told.ended.wait(5)
    own.join()


def test_transfer_left_to_the_free_compute_lane_runs_there_and_its_answer_rides() -> None:
    told = Told()
    lane, own = lane_of(told)

    lane.put(command(1), here=True)
    assert lane.has_work_here()
    lane.run_here(lambda: False)

    assert told.answers == [(1, "MainThread", True)]
    end(lane, own, told)


def test_transfer_of_the_own_thread_is_run_there_with_all_that_is_behind_it() -> None:
    told = Told()
    lane, own = lane_of(told)

    lane.put(command(1, seconds=0.05), here=False)
    lane.put(command(2), here=True)
    assert not lane.has_work_here()
    lane.run_here(lambda: False)
    end(lane, own, told)

    assert told.answers == [(1, "own", False), (2, "own", False)]


def test_compute_lane_stops_as_soon_as_its_rows_are_there() -> None:
    told = Told()
    lane, own = lane_of(told)

    for number in (1, 2, 3):
        lane.put(command(number), here=True)
    lane.run_here(lambda: len(told.answers) == 1)
    end(lane, own, told)

    assert told.answers == [(1, "MainThread", True), (2, "own", False), (3, "own", False)]


def test_two_threads_run_many_transfers_in_order_and_one_at_a_time() -> None:
    told = Told()
    lane, own = lane_of(told)

    for number in range(200):
        lane.put(command(number, seconds=1e-4), here=number % 3 != 0)
        lane.run_here(lambda: False)
    end(lane, own, told)

    assert [ticket for ticket, _, _ in told.answers] == list(range(200))
    assert all(rides == (thread == "MainThread") for _, thread, rides in told.answers)
