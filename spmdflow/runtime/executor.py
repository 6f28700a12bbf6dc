"""A lane: the loop that runs a rank's commands one after the other.

The compute lane runs on the main thread. The transfer lane has a thread of its own, but what a
rank would next wait for is run by the main thread while that is free, which saves two thread
switches. A lane knows operations by name, not what they do. An operation that raises ends the
run: the lane reports it and stays where it is until the comm thread ends the process, or only the
session (`Unwound`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spmdflow.errors import ProtocolError
from spmdflow.runtime.failure import Failure, own_traceback
from spmdflow.runtime.process import leave

Operation = Callable[[dict[str, Any], int], dict[str, Any]]
"""operation(payload, number) -> reply payload; both plain data (runtime/message.py)."""

COMPUTE, TRANSFER = "compute", "transfer"
LANES = (COMPUTE, TRANSFER)

_LAST_RESORT_SECONDS = 60.0


class Unwound(BaseException):
    """The session has failed, the process goes on: leaves a lane from wherever it waits.

    No Exception, so that no code on the way takes it for its own.
    """


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

    @property
    def precedes_call(self) -> bool:
        """Whether the compute lane, when it is free, would next have to wait for this."""
        return bool(self.payload.get("precedes_call"))

    @property
    def needs_everybody(self) -> bool:
        """Whether every rank of the world waits for this one, even if the run has failed."""
        return self.payload.get("operation") == "groups"


class Reporter(Protocol):
    """Where a lane sends what it has to say (runtime/comm.py)."""

    def reply(self, ticket: int, payload: dict[str, Any], *, rides: bool = False) -> None:
        """Answer a command; rides: together with the next answer."""

    def fail(self, failure: Failure) -> None:
        """End the run."""

    def stay(self) -> None:
        """Wait for the end of the run; returns if the process outlives it."""

    def lane_ended(self, name: str) -> None:
        """The lane has run everything before the end of the run."""


class Lane:
    """Runs a lane's commands, one at a time."""

    def __init__(self, name: str, rank: int, reporter: Reporter) -> None:
        self.name, self._rank, self._reporter = name, rank, reporter
        self.operations: Mapping[str, Operation] = {}
        """What this rank can do, by name; set before the first command runs."""
        self.running: tuple[Command, float] | None = None
        """The command that runs and its start (time.monotonic()); read by the comm thread."""

    def run(self, next_command: Callable[[], Command | None]) -> None:
        """Run commands in this thread until there are no more: next_command gave None."""
        is_over = False
        while not is_over:  # once more after the session has failed, for what needs everybody
            with contextlib.suppress(Unwound), self._reporting():
                while (command := next_command()) is not None:
                    self._run_one(command)
                    del command  # it may hold much while the next one is awaited
                is_over = True
            self.running = None
        self._reporter.lane_ended(self.name)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """What is raised inside ends the run."""
        try:
            yield
            return
        except Unwound:
            raise
        except BaseException as err:
            self._reporter.fail(failure_of(err, self._rank, lane=self.name, running=self.running))
        self._reporter.stay()
        raise Unwound

    def _run_one(self, command: Command, *, rides: bool = False) -> None:
        self.running = (command, time.monotonic())
        operation = find_operation(self.operations, command.label, command.payload.get("operation"))
        answer = operation(command.payload, command.number)
        self._reporter.reply(command.ticket, answer, rides=rides)
        self.running = None

    def overdue(self, now: float) -> Command | None:
        """The running command if its limit has passed (time.monotonic())."""
        running = self.running
        return running[0] if running and now > running[1] + running[0].seconds else None


class SharedLane(Lane):
    """A lane that two threads run: its own, and the compute lane's while that has nothing to do.

    Whoever has the turn runs the next command, so they run in order and one at a time.
    """

    def __init__(self, name: str, rank: int, reporter: Reporter) -> None:
        super().__init__(name, rank, reporter)
        self._line: deque[tuple[Command, bool]] = deque()
        self._turn = threading.Lock()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def put(self, command: Command, *, here: bool) -> None:
        """Append a command; here: the calling thread will `run_here`."""
        self._line.append((command, here))
        if not here:
            self.wake()

    def wake(self, *, end: bool = False) -> None:
        """Let the lane's own thread run what is there; end: and then end."""
        self._calls.put(end)

    def run_own_thread(self) -> None:
        """The loop of the lane's own thread."""
        is_over = False
        with contextlib.suppress(Unwound):
            while not is_over:
                is_over = self._calls.get()
                while self._run_next():
                    pass
        self.running = None
        self._reporter.lane_ended(self.name)

    def drop(self) -> None:
        """Forget what has not begun, and let the lane's own thread end."""
        self._line.clear()
        self.wake(end=True)

    def has_work_here(self) -> bool:
        """Whether `run_here` would run something."""
        return bool(self._line) and self._line[0][1]

    def run_here(self, is_enough: Callable[[], bool]) -> None:
        """Run what was left to this thread until is_enough(); the other thread gets the rest."""
        while not is_enough() and self._run_next(here=True):
            pass
        if self._line:
            self.wake()

    def _run_next(self, *, here: bool = False) -> bool:
        """Run the next command, if there is one; here: a call follows, so the answer can wait."""
        if here and not self.has_work_here():
            return False
        with self._turn, self._reporting():
            if not self._line or (here and not self.has_work_here()):
                return False
            self._run_one(self._line.popleft()[0], rides=here)
            return True


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
        own_traceback=own_traceback(err),
    )


def stay_until(over: threading.Event) -> None:
    """Wait for `over`, or for the comm or io thread to end this process; end it if they do not."""
    until = time.monotonic() + _LAST_RESORT_SECONDS
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(KeyboardInterrupt):  # impatience must not cost the report
            if over.wait(left):
                return
    leave(1)


def find_operation(operations: Mapping[str, Operation], label: str, name: object) -> Operation:
    """operations[name]; ProtocolError naming the known ones."""
    if not isinstance(name, str) or name not in operations:
        raise ProtocolError(
            f"{label}: operation {name!r}; expected one of {sorted(operations)}; "
            f"add it to the operations of the session"
        )
    return operations[name]
