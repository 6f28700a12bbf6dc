"""A lane without a session: its order, and what is left of it when the session has failed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from spmdflow.data.store import RowCondition
from spmdflow.failure.cause import Failure
from spmdflow.runtime.executor import COMPUTE, Lane, Unwound
from spmdflow.worker_api.command import Command


class Told:
    """What a lane said, in order."""

    def __init__(self, lane_name: str = COMPUTE) -> None:
        self.answers: list[int] = []
        self.failures: list[Failure] = []
        self.ended = threading.Event()
        self.lane = Lane(lane_name, 0, self)
        self.lane.operations = {"move": self.move, "groups": self.move}
        self.thread = threading.Thread(target=self.lane.run)

    def move(self, payload: dict[str, Any], number: int) -> dict[str, Any]:
        if payload.get("fails"):
            raise ValueError(number)
        return {}

    def reply(self, ticket: int, payload: dict[str, Any], duration: list[float]) -> None:
        self.answers.append(ticket)

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)

    def stay(self) -> None:
        """The session unwinds at once."""
        self.lane.unwind()

    def lane_ended(self, name: str) -> None:
        self.ended.set()


def command(number: int, operation: str = "move", **payload: Any) -> Command:
    return Command.from_message(
        number, number, COMPUTE, "a.move", {"operation": operation, **payload}
    )


def test_lane_runs_its_commands_in_order_until_the_end() -> None:
    told = Told()
    told.thread.start()

    for number in range(200):
        told.lane.put(command(number))
    told.lane.put(None)
    told.thread.join(60)

    assert told.ended.is_set()
    assert told.answers == list(range(200))


def test_failed_lane_drops_what_has_not_begun_but_makes_the_groups_of_everybody() -> None:
    told = Told()

    for number, operation in ((1, "move"), (3, "move"), (4, "groups"), (5, "move")):
        told.lane.put(command(number, operation, fails=number == 3))
    told.lane.run()

    assert told.answers == [1, 4]
    assert [failure.number for failure in told.failures] == [3]


def test_command_after_the_unwinding_is_not_run() -> None:
    told = Told()

    told.lane.unwind()
    told.lane.put(command(1))
    told.lane.run()

    assert told.answers == [] and told.ended.is_set()


def test_wait_for_rows_ends_with_the_session() -> None:
    rows = RowCondition()
    threading.Timer(0.05, rows.end, [Unwound()]).start()

    with pytest.raises(Unwound):
        rows.wait_until(lambda: False, 60)


def test_wait_for_rows_ends_when_they_are_there_or_at_its_limit() -> None:
    rows = RowCondition()
    arrived = threading.Event()

    def arrive() -> None:
        arrived.set()
        rows.wake()

    threading.Timer(0.05, arrive).start()

    assert rows.wait_until(arrived.is_set, 60)
    assert not rows.wait_until(lambda: False, 0.01)
