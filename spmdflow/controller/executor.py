"""A lane: the loop that runs a rank's commands one after the other.

The compute lane runs on the main thread, the transfer lane on its own. A lane knows operations
by name, not what they do. An operation that raises ends the run: the lane reports it and stays
where it is until the comm thread ends the process.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spmdflow.controller.failure import Failure
from spmdflow.controller.process import leave
from spmdflow.errors import ProtocolError

Operation = Callable[[dict[str, Any], int], dict[str, Any]]
"""operation(payload, number) -> reply payload; both plain data (controller/message.py)."""

COMPUTE, TRANSFER = "compute", "transfer"
LANES = (COMPUTE, TRANSFER)

_LAST_RESORT_SECONDS = 60.0


@dataclass(frozen=True)
class Command:
    """One thing to do."""

    ticket: int
    """Names the order in the controller."""
    number: int
    lane: str
    label: str
    seconds: float
    """Limit, counted from the moment it starts."""
    payload: dict[str, Any]


class Reporter(Protocol):
    """Where a lane sends what it has to say (controller/comm.py)."""

    def reply(self, ticket: int, payload: dict[str, Any]) -> None:
        """Answer a command."""

    def fail(self, failure: Failure) -> None:
        """End the run."""

    def lane_ended(self, name: str) -> None:
        """The lane has run everything before the end of the run."""


class Lane:
    """The loop over a lane's commands; `run` belongs to one thread."""

    def __init__(
        self,
        name: str,
        rank: int,
        *,
        reporter: Reporter,
        next_command: Callable[[], Command | None],
    ) -> None:
        """next_command waits for the next command; None is the end."""
        self.name, self._rank, self._reporter = name, rank, reporter
        self._next_command = next_command
        self.running: tuple[Command, float] | None = None
        """The command that runs and its start (time.monotonic()); read by the comm thread."""

    def run(self, operations: Mapping[str, Operation]) -> None:
        """Run commands until there are no more."""
        try:
            while (command := self._next_command()) is not None:
                self._run_one(command, operations)
                del command  # it may hold much while the next one is awaited
        except BaseException as err:
            self._reporter.fail(failure_of(err, self._rank, lane=self.name, running=self.running))
            stay_until_ended()
        self._reporter.lane_ended(self.name)

    def _run_one(self, command: Command, operations: Mapping[str, Operation]) -> None:
        self.running = (command, time.monotonic())
        operation = find_operation(operations, command.label, command.payload.get("operation"))
        answer = operation(command.payload, command.number)
        self._reporter.reply(command.ticket, answer)
        self.running = None

    def overdue(self, now: float) -> Command | None:
        """The running command if its limit has passed (time.monotonic())."""
        running = self.running
        return running[0] if running and now > running[1] + running[0].seconds else None


def failure_of(
    err: BaseException,
    rank: int,
    *,
    kind: str = "exception",
    lane: str | None = None,
    running: tuple[Command, float] | None = None,
) -> Failure:
    """An exception as a Failure, with its traceback and what was running."""
    if isinstance(err, KeyboardInterrupt):
        kind = "interrupt"
    return Failure(
        kind,
        rank,
        f"{type(err).__name__}: {err}" if str(err) else type(err).__name__,
        label=running[0].label if running else "",
        number=running[0].number if running else None,
        lane=lane,
        traceback="".join(traceback.format_exception(err)),
    )


def stay_until_ended() -> None:
    """Wait for the comm or io thread to end this process; end it if they do not."""
    until = time.monotonic() + _LAST_RESORT_SECONDS
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(KeyboardInterrupt):  # impatience must not cost the report
            time.sleep(left)
    leave(1)


def find_operation(operations: Mapping[str, Operation], label: str, name: object) -> Operation:
    """operations[name]; ProtocolError naming the known ones."""
    if not isinstance(name, str) or name not in operations:
        raise ProtocolError(
            f"{label}: operation {name!r}; expected one of {sorted(operations)}; "
            f"add it to the operations of the session"
        )
    return operations[name]
