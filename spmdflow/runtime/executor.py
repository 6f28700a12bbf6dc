"""A lane: the loop that runs a rank's commands one after the other.

The compute lane runs on the main thread; the transfer lane and the files lane, which writes
checkpoints during training, run in threads of their own. A lane knows operations by name, not
what they do. An operation that raises ends the run: the lane reports it and stays where it is
until the comm thread ends the process, or only the session (`Unwound`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from spmdflow.errors import ProtocolError
from spmdflow.failure.cause import Failure, error_contexts
from spmdflow.failure.lane_state import PEERS, ROWS, LaneState, lane_state_of
from spmdflow.failure.process import leave
from spmdflow.failure.user_code import own_traceback
from spmdflow.runtime.process import give_way
from spmdflow.worker_api.command import Command

Operation = Callable[[dict[str, Any], int], dict[str, Any]]
"""operation(payload, number) -> reply payload; both plain data (message.py)."""

COMPUTE = "compute"
TRANSFER = "transfer"
FILES = "files"

_LAST_RESORT_SECONDS = 60.0


class Unwound(BaseException):
    """The session has failed, the process goes on: leaves a lane from wherever it waits.

    Not an Exception, so that no `except Exception` on the way catches it.
    """


class Reporter(Protocol):
    """Where a lane sends replies and failures (runtime/comm.py)."""

    def reply(self, ticket: int, payload: dict[str, Any], duration: list[float]) -> None:
        """Answer a command. duration: the fields of a `CallDuration`."""

    def fail(self, failure: Failure) -> None:
        """End the run."""

    def stay(self) -> None:
        """Wait for the end of the run; returns if the process outlives it."""

    def lane_ended(self, name: str) -> None:
        """The lane has run everything before the end of the run."""


class Lane:
    """Runs a lane's commands, one at a time."""

    def __init__(self, name: str, rank: int, reporter: Reporter) -> None:
        self.name = name
        self._rank = rank
        self._reporter = reporter
        self.operations: Mapping[str, Operation] = {}
        """What this rank can do, by name; set before the first command runs."""
        self.running: tuple[Command, float] | None = None
        """The command that runs and its start (time.monotonic()); read by the comm thread."""
        self.waits = {PEERS: 0.0, ROWS: 0.0}
        """Seconds of it in which the lane waited, as sampled by the comm thread."""
        self.last = ""
        """The command that ended last: its label and number."""
        self._thread = 0
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._is_over = False

    def put(self, command: Command | None) -> None:
        """Append a command to the lane's queue; None ends the lane after the commands before it.

        After `unwind` it is dropped. If the command has an early method, that is started here, in a
        thread, before the command's turn. Called by the comm thread.
        """
        if not self._is_over:
            if command is not None and "early" in command.payload and "begin" in self.operations:
                self.operations["begin"](dict(command.payload), command.number)
            self._commands.put(command)

    def state(self, *, with_line: bool = True) -> LaneState | None:
        """What the lane's thread is doing in the command that runs; None between two commands."""
        return lane_state_of(self._thread, Lane.run.__code__, with_line=with_line)

    def sample(self, seconds: float, *, as_idle: bool = False) -> None:
        """Add the seconds since the last sample to `waits` if the lane now waits for ranks or rows.

        as_idle: count them as waiting for rows whatever the lane does, because this process was
        stopped. Nothing is added while the lane is idle. Called by the comm thread.
        """
        state = self.state(with_line=False) if self.running else None
        if state is not None and (as_idle or state.kind in self.waits):
            self.waits[ROWS if as_idle else state.kind] += seconds

    def unwind(self) -> None:
        """Drop queued commands, ignore later ones, and end the lane after the one that runs.

        Commands that make process groups stay queued, because every rank of the world takes part in
        them and would wait for this rank. Called by the comm thread.
        """
        self._is_over = True
        with contextlib.suppress(queue.Empty):
            left = []
            while True:
                left.append(self._commands.get_nowait())
        for command in left:
            if command and command.payload.get("operation") == "groups":
                self._commands.put(command)  # every rank of the world waits for this one
        self._commands.put(None)

    def run(self) -> None:
        """Run the lane's commands in this thread, in order, until the None that ends it.

        Each reply is sent with [seconds without waiting for rows, seconds of these in collectives].
        An exception of an operation is reported as a failure, which ends the run; the lane then
        waits for that end. If the process outlives it, the lane runs what `unwind` left in the
        queue. Finally calls reporter.lane_ended. Sets `running` and `last` meanwhile. The files
        lane lowers its CPU priority.
        """
        is_over = False
        self._thread = threading.get_ident()
        if self.name == FILES:
            give_way()
        while not is_over:  # once more after a failure, for commands that need all ranks
            failure = None
            try:
                while (command := self._commands.get()) is not None:
                    started = time.monotonic()
                    self.waits = {PEERS: 0.0, ROWS: 0.0}
                    self.running = (command, started)
                    operation = find_operation(self.operations, command.label, command.payload)
                    payload = operation(dict(command.payload), command.number)
                    own = max(0.0, time.monotonic() - started - self.waits[ROWS])
                    self._reporter.reply(
                        command.ticket, payload, [own, min(own, self.waits[PEERS])]
                    )
                    self.running = None
                    self.last = f"{command.label} (call {command.number})"
                    del command, payload  # they may hold much while the next one is awaited
                is_over = True
            except Unwound:
                pass
            except BaseException as err:
                failure = failure_of(err, self._rank, lane=self.name, running=self.running)
            if failure is not None:
                self._reporter.fail(failure)
                self._reporter.stay()
            self.running = None
        self._reporter.lane_ended(self.name)


def failure_of(
    err: BaseException,
    rank: int,
    *,
    kind: str = "exception",
    lane: str | None = None,
    running: tuple[Command, float] | None = None,
) -> Failure:
    """Return the `Failure` that describes an exception on a rank: type, message and traceback.

    The cause also has the notes of `error_context`. KeyboardInterrupt gets the kind "interrupt"
    whatever `kind` is. running: the command that was running and its start, or None.
    """
    if isinstance(err, KeyboardInterrupt):
        kind = "interrupt"
    cause = f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
    return Failure(
        kind,
        rank,
        ", ".join([cause, *error_contexts(err)]),
        label=running[0].label if running else "",
        number=running[0].number if running else None,
        lane=lane,
        traceback="".join(traceback.format_exception(err)),
        own_traceback=own_traceback(err),
    )


def stay_until(over: threading.Event, is_busy: Callable[[], bool] = lambda: False) -> None:
    """Wait for the event `over`; if it is not set within 60 s, end this process with status 1.

    While is_busy() is true, the 60 s start again, because something with a time limit of its own
    must finish first. Ctrl-C is ignored meanwhile. Returns only if `over` was set.
    """
    until = time.monotonic() + _LAST_RESORT_SECONDS
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C must not lose the report
            if over.wait(min(left, _LAST_RESORT_SECONDS / 4)):
                return
        if is_busy():
            until = time.monotonic() + _LAST_RESORT_SECONDS
    leave(1)


def find_operation(
    operations: Mapping[str, Operation], label: str, payload: Mapping[str, Any]
) -> Operation:
    """Return the operation with the name payload["operation"].

    ProtocolError with the known names if it is missing, no str or unknown. label: the call, for the
    message.
    """
    name = payload.get("operation")
    if not isinstance(name, str) or name not in operations:
        raise ProtocolError(
            f"{label}: operation {name!r}; expected one of {sorted(operations)}; "
            f"add it to the operations of the session"
        )
    return operations[name]
