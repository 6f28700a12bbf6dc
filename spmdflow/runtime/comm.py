"""The comm thread of a rank, which answers at any time, whatever the lanes are doing.

It passes commands to the lanes, sends heartbeats, and watches everything that may end a run: the
controller, the parent process (torchrun killed with -9 leaves orphans), and signals that ask the
run to stop. The controller enforces the limits of calls, by the heartbeats (failure/limit.py). When
the run fails, this thread ends the process, because the lanes may be blocked in a collective. If
every process of the run is alive and the program around the session wants to continue, the
controller sends UNWIND instead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any

from spmdflow.data.store import RowCondition
from spmdflow.errors import MessageError
from spmdflow.failure.cause import (
    SHOW_SECONDS,
    UNWIND_SECONDS,
    Failure,
    call_within,
    failure_record,
    write_failure,
)
from spmdflow.failure.duration import (
    LIMIT_SECONDS,
    MAX_STOPPED_SECONDS,
    REPORT_SECONDS,
    SILENT_BEATS,
)
from spmdflow.failure.lane_state import ROWS
from spmdflow.failure.peers import Peers
from spmdflow.failure.process import STATES, Process, leave
from spmdflow.failure.settings import SessionSettings
from spmdflow.failure.signals import Signals
from spmdflow.failure.stacks import dump_stacks, line_in_stacks, stacks_path
from spmdflow.runtime.executor import (
    COMPUTE,
    FILES,
    TRANSFER,
    Lane,
    Unwound,
    failure_of,
    stay_until,
)
from spmdflow.runtime.wire import Kind, RankSocket, Waiter
from spmdflow.worker_api.command import Command

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_FROZEN_SECONDS = 10.0
"""If two ticks are this far apart, this process was stopped in between."""
_ABORT_SECONDS = 5.0
"""How long a rank that reported a failure waits for ABORT before it ends on its own."""
_STOPPED_SECONDS = 1.0
"""The same if the controller is stopped, because it may be continued soon."""
_NUM_CHECKS = 8
"""How many checks of the controller are remembered. A neighbour wakes a stopped controller before
it kills it, so that it writes its stacks."""
_DYING_SECONDS = 0.05
"""Time between a process closing its connections and its end becoming visible."""
_GONE_SECONDS = 0.3
"""After the loss of the controller: time to read an ABORT that has already arrived."""


class Comm:
    """One rank's connection to the controller, to which the lanes report."""

    def __init__(
        self,
        endpoint: RankSocket,
        *,
        rank: int,
        controller: Process,
        settings: SessionSettings,
        signals: Signals,
    ) -> None:
        """Create the lanes and the thread; `start` starts the thread.

        endpoint: connected to the controller, whose process is `controller`. signals: read by the
        thread.
        """
        self.compute = Lane(COMPUTE, rank, self)
        self.other_lanes = (Lane(TRANSFER, rank, self), Lane(FILES, rank, self))
        self.arrival = RowCondition()
        """How the compute lane waits for rows."""
        self._lanes = {lane.name: lane for lane in (self.compute, *self.other_lanes)}
        self._endpoint = endpoint
        self._socket = threading.Lock()  # several threads use it in turn
        self._waiter = Waiter()
        self._waiter.watch(endpoint.descriptor)
        self._waiter.watch(endpoint.lost_descriptor)
        self._rank = rank
        self._settings = settings
        self._signals = signals
        self._controller = controller
        self._controller_rank = settings.controller_rank
        self._is_controller = rank == settings.controller_rank
        self.thread = threading.Thread(target=self._run, name="comm", daemon=True)
        self._ended_lanes: list[str] = []
        self._parent = settings.launcher or os.getppid()
        self._neighbours: Peers | None = None
        """Ranks of this node; None until all ranks are connected."""
        self._last_message = time.monotonic()
        """When the controller was last heard."""
        self._controller_lost = self._saw_stopped = False
        self._was_stopped: deque[bool] = deque(maxlen=_NUM_CHECKS)
        """Whether the controller was stopped, at each of the last checks."""
        self._failures: list[Failure] = []
        self.cause: Failure | None = None
        """Why the session failed, if this process continues after it."""
        self._unwound = threading.Event()
        self._all_unwound = False
        self._give_up_at = float("inf")
        self._next_tick = self._next_beat = 0.0
        self._last_tick = self._last_message
        self._report_silence_at = REPORT_SECONDS
        self._continued_at = 0.0
        """When this process was last continued after it was stopped."""

    # ---- called by the lanes and the session

    def start(self) -> None:
        """Send HELLO and start the thread."""
        self._send(Kind.HELLO)
        self.thread.start()

    def reply(self, ticket: int, payload: dict[str, Any], duration: list[float]) -> None:
        """Answer a command. MessageError if payload is not plain data."""
        self._send(Kind.REPLY, [ticket, payload, duration])

    def fail(self, failure: Failure) -> None:
        """Report a failure to the controller, which then ends the run (any thread).

        The controller answers with ABORT or UNWIND, on which the comm thread acts. Without an
        answer, this process ends on its own after 5 s, or after 1 s if the controller is stopped. A
        failure after the session has been unwound is only logged at debug level.
        """
        if self.cause is not None:
            logger.debug("after the end: %s", failure.sentence())
            return
        self._failures.append(failure)
        self._saw_stopped |= self._controller.is_stopped()  # a neighbour may wake and kill it
        wait = _STOPPED_SECONDS if self._saw_stopped else _ABORT_SECONDS
        self._give_up_at = min(self._give_up_at, time.monotonic() + wait)
        self._send(Kind.FAILURE, failure)

    def stay(self) -> None:
        """Wait for the end of the run. Returns if the process continues after it (any thread)."""
        stay_until(self._unwound)

    def lane_ended(self, name: str) -> None:
        """Note that a lane has run all commands that precede CLOSE."""
        self._ended_lanes.append(name)
        self._waiter.wake()

    def _send(self, kind: Kind, body: Any = None) -> None:
        """Send an envelope to the controller (any thread).

        Wakes the comm thread if input may have arrived unnoticed meanwhile. A lock serializes the
        threads that use the socket. MessageError if `body` is not plain data.
        """
        data = self._endpoint.seal(kind, body)
        with self._socket:
            unnoticed = self._endpoint.send(data)
        if unnoticed:
            self._waiter.wake()

    # ---- the thread

    def _run(self) -> None:
        """Run the comm thread: serve messages and clocks until all lanes have ended, then send BYE.

        After UNWIND it also sends UNWOUND, and waits until all ranks have left their lanes. Then it
        closes the socket. An exception is recorded as a failure, and ends this process with status
        1.
        """
        try:
            self._waiter.watch(self._signals.descriptor)
            while len(self._ended_lanes) < len(self._lanes):
                self._step()
            if self.cause is not None:
                self._send(Kind.UNWOUND)
                while not self._all_unwound:
                    self._step()
            self._send(Kind.BYE)
            if self._neighbours:
                self._neighbours.unwatch(self._waiter)
            self._endpoint.close()
            self._waiter.close()
        except BaseException as err:
            try:
                logger.exception("the comm thread failed")
                self._failures.append(failure_of(err, self._rank))
                self._leave_on_own()
            finally:
                leave(1)

    def _step(self) -> None:
        """Run the periodic checks if due, handle all messages that arrived, then wait.

        Waits until a descriptor is readable or the next check is due (every 0.25 s).
        """
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_SECONDS
            self._tick(now)
        while (data := self._receive()) is not None:
            self._handle(data)
        self._notice(self._waiter.wait(max(0.0, self._next_tick - time.monotonic())))

    def _receive(self) -> bytes | None:
        """The next envelope; None if there is none."""
        with self._socket:
            return self._endpoint.receive()

    def _handle(self, data: bytes) -> None:
        """Decode an envelope from the controller and act on it, by its kind.

        COMMAND goes to its lane, CLOSE ends the lanes (after UNWIND: says that all ranks have left
        theirs), WELCOME gives the ranks of this node, UNWIND leaves the lanes, LOOK writes stacks,
        ABORT ends this process, BEAT only proves that the controller lives. An envelope of another
        run is dropped, and one that cannot be decoded ends the run. Any other one resets the clock
        of the controller's silence.
        """
        try:
            envelope = self._endpoint.open(data, self._controller_rank)
        except MessageError as err:
            self.fail(failure_of(err, self._rank))
            return
        if envelope is None:
            return
        self._last_message = time.monotonic()
        kind, body = envelope
        if kind is Kind.COMMAND:
            self._lanes[body[2]].put(Command.from_message(*body))
        elif kind is Kind.WELCOME:
            self._neighbours = Peers(body, own_rank=self._rank)
            if not self._controller.is_local():  # it cannot watch the processes of this node
                self._neighbours.watch(self._waiter)
        elif kind is Kind.CLOSE and self.cause is not None:
            self._all_unwound = True
        elif kind is Kind.CLOSE:
            for lane in self._lanes.values():
                lane.put(None)
        elif kind is Kind.UNWIND:
            self._unwind(body)
        elif kind is Kind.LOOK:
            # a process that was just continued has written its stacks on a signal
            if time.monotonic() > self._continued_at + _GONE_SECONDS:
                self._show_stacks(body, "a call takes long")
        elif kind is Kind.ABORT:
            self._abort(body)

    # ---- watching

    def _notice(self, ready: list[int]) -> None:
        """Act at once on a signal, a lost connection, and processes of this node that have ended.

        ready: the readable descriptors. A signal makes the next tick due now. A lost connection to
        the controller is recorded as its loss. ENDED is sent to the controller for each ended rank
        of this node; this is watched only if the controller is on another node.
        """
        if self._signals.descriptor in ready:
            self._next_tick = 0.0
        if (not ready or self._endpoint.lost_descriptor in ready) and self._endpoint.any_lost():
            if self._neighbours:
                secret = ""
            else:
                secret = "; is SPMDFLOW_SECRET the same on every rank?"
            self._lost_controller(f"its connection is lost{secret}")
        if self._neighbours and self._neighbours.unwatch(self._waiter, ready):
            for ended in self._neighbours.ended_ranks().items():
                self._send(Kind.ENDED, list(ended))

    def _tick(self, now: float) -> None:
        """Sample the lanes, send a heartbeat if due, and check everything that may end the run.

        Checked are signals (reported to the controller), the end of the wait for its ABORT, the end
        of the parent process (a failure of kind "launcher"), and the controller's end or silence.
        If 10 s passed since the last tick, this process was stopped: that time counts neither as
        silence of the controller nor as work of a lane.
        """
        passed = now - self._last_tick
        self._last_tick = now
        was_stopped = passed > _FROZEN_SECONDS
        if was_stopped:  # then the controller was not silent
            self._last_message += passed
            self._continued_at = now
        for lane in self._lanes.values():
            lane.sample(passed, as_idle=was_stopped)
        if now >= self._next_beat:
            self._next_beat = now + self._settings.beat_seconds
            self._beat()
        self._check_signals()
        if now >= self._give_up_at:
            self._leave_on_own()
        if not self._failures and os.getppid() != self._parent:
            ended = f"the launcher (parent process {self._parent}) ended without ending its ranks"
            self.fail(self._failure_with_call("launcher", self._rank, ended))
        self._check_controller(now)

    def _check_signals(self) -> None:
        """Report signals that ask the run to stop to the controller."""
        for number in self._signals.take():
            self._send(Kind.STOP, number)

    def _beat(self) -> None:
        """Send a heartbeat: for each lane that runs a command, the fields of a `LaneActivity`.

        These are the call's number, the lane, seconds spent waiting for rows, what it is doing, its
        line, and the state of this process in words if that is D (waits for a disk or device).
        """
        activities = []
        process_state = Process.of(os.getpid()).state()
        for lane in self._lanes.values():
            if (running := lane.running) and (state := lane.state()):
                in_words = STATES[process_state] if process_state == "D" else ""
                number = running[0].number
                row_seconds = lane.waits[ROWS]
                activities.append(
                    [number, lane.name, row_seconds, state.kind, state.line, in_words]
                )
        self._send(Kind.BEAT, activities)

    def _show_stacks(self, silent: list[int], why: str) -> None:
        """Write the stacks of this process, and signal silent ranks of this node to write theirs.

        Appends to RUN_DIR/stacks-rank<k>.txt, with a header that has `why` and the running command;
        not if RUN_DIR belongs to another run by now. Then sends a heartbeat. silent: ranks.
        """
        for rank, process in self._neighbours.processes.items() if self._neighbours else ():
            if rank in silent and rank != self._rank:
                process.show_stacks()
        header = self._failure_with_call(
            "", self._rank, f"{why} (the controller silent for {self._silence():.0f} s)"
        )
        path = stacks_path(self._settings.run_dir, self._rank)
        dump_stacks(path, header.sentence(), self._settings.owns_run_dir)
        self._beat()

    def _silence(self) -> float:
        """Seconds since the controller was last heard."""
        return time.monotonic() - self._last_message

    def _check_controller(self, now: float) -> None:
        """Prepare to leave if the controller's process has ended or has been silent for too long.

        "Too long" is `_silence_limit`. After REPORT_SECONDS of silence, and each time it has
        doubled, this rank writes its stacks, makes a controller on this node write its own, and one
        rank of each node logs a warning. Does nothing on the controller's rank or once the
        controller is lost.
        """
        if self._is_controller or self._controller_lost:
            return
        self._was_stopped.append(self._controller.is_stopped())
        if self._controller.has_ended():
            self._lost_controller(self._controller.end_cause_or_none() or "ended")
        elif self._neighbours and self._silence() > self._silence_limit():
            state = STATES.get(self._controller.state() or "", "in an unknown state")
            how = f"{state}, silent for {self._silence():.0f} s"
            self._lost_controller(how, kind="stopped")
        elif self._silence() < REPORT_SECONDS:
            self._report_silence_at = REPORT_SECONDS
        elif self._neighbours and self._silence() > self._report_silence_at:
            self._report_silence_at = 2 * self._silence()
            controller = self._settings.controller_rank
            if self._rank == min({*self._neighbours.processes} - {controller}):
                logger.warning(
                    "rank %d (the controller) has been silent for %.0f s: %s; stacks: %s",
                    controller,
                    self._silence(),
                    self._controller.describe(),
                    self._settings.run_dir / "stacks-rank*.txt",
                )
            self._show_stacks([controller], "the controller is silent")

    def _silence_limit(self) -> float:
        """Return the seconds of silence after which this rank gives the controller up as lost.

        run.call_seconds if it is set, but at least three heartbeat intervals. Otherwise 75 s if its
        process is stopped, and 600 s if not.
        """
        if self._settings.call_seconds is not None:
            return max(self._settings.call_seconds, SILENT_BEATS * self._settings.beat_seconds)
        if self._controller.is_stopped():
            return MAX_STOPPED_SECONDS
        return LIMIT_SECONDS

    def _lost_controller(self, how: str, *, kind: str = "death") -> None:
        """Record that the controller is lost; this process ends 0.3 s later.

        An ABORT that has already arrived is still read. Puts a failure of the controller's rank
        first in the list of failures: how its process ended, and which command this rank was
        running. how: what was noticed. kind: death or stopped. Does nothing on the controller's own
        rank, or if the loss is already known.
        """
        if self._is_controller or self._controller_lost:
            return
        self._controller_lost = True
        self._saw_stopped |= any(self._was_stopped)
        cause = f"the controller's process {self._controller.pid}: {how}"
        end_cause = self._controller.end_cause_or_none(_DYING_SECONDS)
        if end_cause and end_cause not in how:
            cause += f" ({end_cause})"
        here = self._failure_with_call(kind, self._rank, cause)
        if here.label:
            cause += f"; this rank was running {here.label} (call {here.number}, {here.lane} lane)"
        elif self.compute.last:
            cause += f"; this rank was idle after {self.compute.last}"
        self._failures.insert(0, Failure(kind, self._settings.controller_rank, cause))
        self._give_up_at = min(self._give_up_at, time.monotonic() + _GONE_SECONDS)

    # ---- the end of a failed run

    def _unwind(self, cause: Failure) -> None:
        """Leave all lanes, because the session has failed but this process continues.

        Lanes drop their queued commands, and a wait for rows raises `Unwound`. `stay` returns. Sets
        `cause`. This process ends on its own if CLOSE, which follows when the lanes of all ranks
        have ended, does not come within 15 s.
        """
        self.cause = cause
        self._failures.insert(0, cause)
        self._give_up_at = time.monotonic() + UNWIND_SECONDS + _ABORT_SECONDS
        for lane in self._lanes.values():
            lane.unwind()
        self.arrival.end(Unwound())
        self._unwound.set()

    def _abort(self, to_kill: list[int]) -> None:
        """Kill the ranks `to_kill` of this node, write own stacks, and exit with status 1.

        Never returns. This rank itself and ranks of other nodes are skipped. The exit happens even
        if a step before it raises.
        """
        try:
            if self._neighbours:
                self._neighbours.kill([rank for rank in to_kill if rank != self._rank])
            self._show_stacks([], "the run failed")
        finally:
            leave(1)

    def _leave_on_own(self) -> None:
        """Write failure-rank<k>.json, kill a controller on this node, and exit with status 1.

        Called if no ABORT came in time. The cause is the first failure; if the controller is
        stopped, that comes first. The file is not written if RUN_DIR belongs to another run by now.
        The second rank of the run also calls show_failure in the controller's place. Never returns.
        """
        controller = self._settings.controller_rank
        self._saw_stopped |= self._controller.is_stopped()
        is_known = self._failures[0].rank == controller and self._failures[0].kind == "stopped"
        if not self._is_controller and not is_known and self._saw_stopped:
            cause = f"the controller's process {self._controller.pid} is stopped"
            self._failures.insert(0, self._failure_with_call("stopped", controller, cause))
        if not self._is_controller and self._neighbours:
            self._neighbours.kill([controller])
            if self._failures[0].kind == "stopped":
                line = line_in_stacks(stacks_path(self._settings.run_dir, controller))
                self._failures[0] = replace(self._failures[0], where=line)
        first = self._failures[0]
        record = failure_record(first, self._failures)
        if self._settings.owns_run_dir():
            write_failure(self._settings.run_dir / f"failure-rank{self._rank}.json", record)
        if first.where:
            where = f"; its Python was at {first.where}"
        else:
            where = ""
        logger.error("run failed: %s%s", first.sentence(), where)
        if self._rank in self._settings.ranks[1:2]:  # one rank does it in the controller's place
            call_within(SHOW_SECONDS, self._settings.show_failure)
        self._abort([])

    def _failure_with_call(self, kind: str, rank: int, cause: str) -> Failure:
        """Return a `Failure` of `rank` that names the command which this rank is running.

        It is that of the first busy lane, in the order compute, transfer, files. If all are idle,
        no command is named.
        """
        for lane in self._lanes.values():
            if running := lane.running:
                command = running[0]
                return Failure(kind, rank, cause, command.label, command.number, lane.name)
        return Failure(kind, rank, cause)
