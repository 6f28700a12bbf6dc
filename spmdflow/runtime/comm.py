"""The comm thread of a rank: the one that always answers, whatever the lanes are doing.

Hands commands to the lanes, sends heartbeats, and watches for everything that ends a run: the
controller, the parent process (torchrun killed with -9 leaves orphans), signals that ask the
run to stop. The limits of calls are not among it: the controller enforces them by the heartbeats
(runtime/limit.py). When the run fails it ends the process itself: the lanes may be blocked in a
collective. If every process of the run is alive and the program around the session wants to go on,
the controller says UNWIND instead.
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
    as_record,
    call_within,
    write_failure,
)
from spmdflow.failure.duration import HELD_SECONDS, LIMIT_SECONDS, LOOK_SECONDS, SILENT_BEATS
from spmdflow.failure.lane_state import ROWS
from spmdflow.failure.process import STATES, Process, leave
from spmdflow.failure.signals import Signals
from spmdflow.failure.stacks import dump_stacks, line_in_stacks, stacks_path
from spmdflow.runtime.executor import (
    COMPUTE,
    FILES,
    TRANSFER,
    Command,
    Lane,
    Unwound,
    failure_of,
    stay_until,
)
from spmdflow.runtime.peers import Peers
from spmdflow.runtime.rendezvous import SessionSettings
from spmdflow.runtime.wire import Kind, RankSocket, Waiter

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_FROZEN_SECONDS = 10.0
"""So long between two ticks: this process was stopped."""
_ABORT_SECONDS = 5.0
"""After reporting a failure a rank waits this long for ABORT, then ends by itself."""
_STOPPED_SECONDS = 1.0
"""The same if the controller is stopped: it may be continued, but not for long."""
_REMEMBERED_LOOKS = 8
"""A neighbour wakes a stopped controller, that it may write its stacks, before it is killed."""
_DYING_SECONDS = 0.05
"""A process closes its connections this long before its end can be seen."""
_GONE_SECONDS = 0.3
"""After losing the controller: time for an ABORT that is already here to be read."""


class Comm:
    """One rank's connection to the controller; what the lanes report to."""

    def __init__(
        self,
        endpoint: RankSocket,
        *,
        rank: int,
        controller: Process,
        settings: SessionSettings,
        signals: Signals,
    ) -> None:
        self.compute = Lane(COMPUTE, rank, self)
        self.beside = (Lane(TRANSFER, rank, self), Lane(FILES, rank, self))
        self.arrival = RowCondition()
        """How the compute lane waits for rows."""
        self._lanes = {lane.name: lane for lane in (self.compute, *self.beside)}
        self._endpoint = endpoint
        self._socket = threading.Lock()  # several threads may use it by turns
        self._waiter = Waiter()
        self._waiter.watch(endpoint.descriptor)
        self._waiter.watch(endpoint.lost_descriptor)
        self._rank = rank
        self._settings = settings
        self._signals = signals
        self._controller = controller
        self._is_controller = rank == settings.controller_rank
        self.thread = threading.Thread(target=self._run, name="comm", daemon=True)
        self._ended_lanes: list[str] = []
        self._parent = settings.launcher or os.getppid()
        self._neighbours: Peers | None = None
        """Ranks of this node; known from the moment when all ranks are connected."""
        self._heard = time.monotonic()
        self._controller_lost = self._saw_stopped = False
        self._was_stopped: deque[bool] = deque(maxlen=_REMEMBERED_LOOKS)
        """Whether the controller was stopped, look by look."""
        self._failures: list[Failure] = []
        self.cause: Failure | None = None
        """Why the session failed, if this process outlives it."""
        self._unwound = threading.Event()
        self._all_unwound = False
        self._give_up_at = float("inf")
        self._next_tick = self._next_beat = 0.0
        self._last_tick = self._heard
        self._look_at = LOOK_SECONDS
        self._woken = 0.0

    # ---- called by the lanes and the session

    def start(self) -> None:
        """Start the thread; it says HELLO."""
        self._send(Kind.HELLO)
        self.thread.start()

    def reply(self, ticket: int, payload: dict[str, Any], took: list[float]) -> None:
        """Answer a command. MessageError if payload is not plain data."""
        self._send(Kind.REPLY, [ticket, payload, took])

    def fail(self, failure: Failure) -> None:
        """End the run: tell the controller, then obey it or leave (any thread)."""
        if self.cause is not None:
            logger.debug("after the end: %s", failure.sentence())
            return
        self._failures.append(failure)
        self._saw_stopped |= self._controller.is_stopped()  # a neighbour may wake and kill it
        wait = _STOPPED_SECONDS if self._saw_stopped else _ABORT_SECONDS
        self._give_up_at = min(self._give_up_at, time.monotonic() + wait)
        self._send(Kind.FAILURE, failure)

    def stay(self) -> None:
        """Wait for the end of the run; returns if the process outlives it (any thread)."""
        stay_until(self._unwound)

    def lane_ended(self, name: str) -> None:
        """A lane has run everything before CLOSE."""
        self._ended_lanes.append(name)
        self._waiter.wake()

    def _send(self, kind: Kind, body: Any = None) -> None:
        data = self._endpoint.seal(kind, body)
        with self._socket:
            unnoticed = self._endpoint.send(data)
        if unnoticed:
            self._waiter.wake()

    # ---- the thread

    def _run(self) -> None:
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
                self._leave_alone()
            finally:
                leave(1)

    def _step(self) -> None:
        """One turn: limits and messages; then wait for more."""
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_SECONDS
            self._tick(now)
        while (data := self._receive()) is not None:
            self._take(data)
        self._notice(self._waiter.wait(max(0.0, self._next_tick - time.monotonic())))

    def _receive(self) -> bytes | None:
        with self._socket:
            return self._endpoint.receive()

    def _take(self, data: bytes) -> None:
        """React to one message."""
        try:
            envelope = self._endpoint.open(data, self._settings.controller_rank)
        except MessageError as err:
            self.fail(failure_of(err, self._rank))
            return
        if envelope is None:
            return
        self._heard = time.monotonic()
        kind, body = envelope
        if kind is Kind.COMMAND:
            self._lanes[body[2]].put(Command(*body))
        elif kind is Kind.WELCOME:
            self._neighbours = Peers(body, own_rank=self._rank)
            if not self._controller.is_local():  # it cannot see how a process ends here
                self._neighbours.watch(self._waiter)
        elif kind is Kind.CLOSE and self.cause is not None:
            self._all_unwound = True
        elif kind is Kind.CLOSE:
            for lane in self._lanes.values():
                lane.put(None)
        elif kind is Kind.UNWIND:
            self._unwind(body)
        elif kind is Kind.LOOK:
            if time.monotonic() > self._woken + _GONE_SECONDS:  # else a signal has shown them
                self._show_stacks(body, "a call takes long")
        elif kind is Kind.ABORT:
            self._obey(body)

    # ---- watching

    def _notice(self, ready: list[int]) -> None:
        """React at once to signals, a lost connection and ended neighbours."""
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
        passed = now - self._last_tick
        self._last_tick = now
        frozen = passed > _FROZEN_SECONDS  # this process was stopped: nobody else was silent
        if frozen:
            self._heard = self._heard + passed
            self._woken = now
        for lane in self._lanes.values():
            lane.sample(passed, as_idle=frozen)
        if now >= self._next_beat:
            self._next_beat = now + self._settings.beat_seconds
            self._beat()
        self._check_signals()
        if now >= self._give_up_at:
            self._leave_alone()
        if not self._failures and os.getppid() != self._parent:
            ended = f"the launcher (parent process {self._parent}) ended without ending its ranks"
            self.fail(self._about("launcher", self._rank, ended))
        self._check_controller(now)

    def _check_signals(self) -> None:
        for number in self._signals.take():
            self._send(Kind.STOP, number)

    def _beat(self) -> None:
        """Say what the lanes do (`Doing` in runtime/stall.py)."""
        doing = []
        state = Process.of(os.getpid()).state()
        for lane in self._lanes.values():
            if (running := lane.running) and (place := lane.place()):
                known = STATES[state] if state == "D" else ""
                number = running[0].number
                waited = lane.waits[ROWS]
                doing.append([number, lane.name, waited, place.kind, place.line, known])
        self._send(Kind.BEAT, doing)

    def _show_stacks(self, silent: list[int], why: str) -> None:
        """Write down where every thread is; ranks of this node that do not answer are signalled."""
        for rank, process in self._neighbours.processes.items() if self._neighbours else ():
            if rank in silent and rank != self._rank:
                process.show_stacks()
        doing = self._about(
            "", self._rank, f"{why} (the controller silent for {self._silent():.0f} s)"
        )
        path = stacks_path(self._settings.run_dir, self._rank)
        dump_stacks(path, doing.sentence(), self._settings.owns_run_dir)
        self._beat()

    def _silent(self) -> float:
        return time.monotonic() - self._heard

    def _check_controller(self, now: float) -> None:
        if self._is_controller or self._controller_lost:
            return
        self._was_stopped.append(self._controller.is_stopped())
        if self._controller.has_ended():
            self._lost_controller(self._controller.end_cause_or_none() or "ended")
        elif self._neighbours and self._silent() > self._silence_limit():
            known = STATES.get(self._controller.state() or "", "in an unknown state")
            how = f"{known}, silent for {self._silent():.0f} s"
            self._lost_controller(how, kind="stopped")
        elif self._silent() < LOOK_SECONDS:
            self._look_at = LOOK_SECONDS
        elif self._neighbours and self._silent() > self._look_at:
            self._look_at = 2 * self._silent()
            controller = self._settings.controller_rank
            if self._rank == min({*self._neighbours.processes} - {controller}):
                text = "rank %d, the controller, has been silent for %.0f s: %s; stacks: %s"
                where = self._settings.run_dir / "stacks-rank*.txt"
                about = self._controller.describe()
                logger.warning(text, controller, self._silent(), about, where)
            self._show_stacks([controller], "the controller is silent")

    def _silence_limit(self) -> float:
        """How long the controller, which enforces the limits of calls, may be silent."""
        if self._settings.call_seconds is not None:
            return max(self._settings.call_seconds, SILENT_BEATS * self._settings.beat_seconds)
        if self._controller.is_stopped():
            return HELD_SECONDS
        return LIMIT_SECONDS

    def _lost_controller(self, how: str, *, kind: str = "death") -> None:
        """The controller cannot end the run any more, so every rank does."""
        if self._is_controller or self._controller_lost:
            return
        self._controller_lost = True
        self._saw_stopped |= any(self._was_stopped)
        cause = f"the controller's process {self._controller.pid}: {how}"
        known = self._controller.end_cause_or_none(_DYING_SECONDS)
        if known and known not in how:
            cause += f" ({known})"
        here = self._about(kind, self._rank, cause)
        if here.label:
            cause += f"; this rank was running {here.label} (call {here.number}, {here.lane} lane)"
        elif self.compute.last:
            cause += f"; this rank was idle after {self.compute.last}"
        self._failures.insert(0, Failure(kind, self._settings.controller_rank, cause))
        self._give_up_at = min(self._give_up_at, time.monotonic() + _GONE_SECONDS)

    # ---- the end of a failed run

    def _unwind(self, cause: Failure) -> None:
        """UNWIND: let go of all lanes; CLOSE says that every rank has, and the process goes on."""
        self.cause = cause
        self._failures.insert(0, cause)
        self._give_up_at = time.monotonic() + UNWIND_SECONDS + _ABORT_SECONDS
        for lane in self._lanes.values():
            lane.unwind()
        self.arrival.end(Unwound())
        self._unwound.set()

    def _obey(self, to_kill: list[int]) -> None:
        """ABORT: write down where every thread is, end stopped neighbours, leave."""
        try:
            if self._neighbours:
                self._neighbours.kill([rank for rank in to_kill if rank != self._rank])
            self._show_stacks([], "the end")
        finally:
            leave(1)

    def _leave_alone(self) -> None:
        """No ABORT came: name the cause in a file of our own and leave."""
        controller = self._settings.controller_rank
        self._saw_stopped |= self._controller.is_stopped()
        known_lost = self._failures[0].rank == controller and self._failures[0].kind == "stopped"
        if not self._is_controller and not known_lost and self._saw_stopped:
            cause = f"the controller's process {self._controller.pid} is stopped"
            self._failures.insert(0, self._about("stopped", controller, cause))
        if not self._is_controller and self._neighbours:
            self._neighbours.kill([controller])
            if self._failures[0].kind == "stopped":
                line = line_in_stacks(stacks_path(self._settings.run_dir, controller))
                self._failures[0] = replace(self._failures[0], where=line)
        cause_first = self._failures[0]
        record = as_record(cause_first, self._failures)
        if self._settings.owns_run_dir():
            write_failure(self._settings.run_dir / f"failure-rank{self._rank}.json", record)
        if cause_first.where:
            where = f"; its Python was at {cause_first.where}"
        else:
            where = ""
        logger.error("run failed: %s%s", cause_first.sentence(), where)
        if self._rank in self._settings.ranks[1:2]:  # nobody else would
            call_within(SHOW_SECONDS, self._settings.show_failure)
        self._obey([])

    def _about(self, kind: str, rank: int, cause: str) -> Failure:
        """A failure with what this rank is running."""
        for lane in self._lanes.values():
            if running := lane.running:
                command = running[0]
                return Failure(kind, rank, cause, command.label, command.number, lane.name)
        return Failure(kind, rank, cause)
