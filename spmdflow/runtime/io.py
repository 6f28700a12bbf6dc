"""The controller's transport: the ROUTER socket, and the io thread that serves it.

Sends calls in the order in which they were submitted (per rank one FIFO stream for all lanes),
collects the replies, runs `on_done` when all have come, and watches the session while the script
computes (failure/session_watch.py). One lock serializes all of that.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from spmdflow.errors import RunFailed
from spmdflow.failure.cause import Failure
from spmdflow.failure.collector import CONNECTION_LOST, FailureCollector
from spmdflow.failure.duration import CallDuration
from spmdflow.failure.peers import Peers
from spmdflow.failure.process import leave
from spmdflow.failure.session_watch import SessionWatch
from spmdflow.failure.settings import SessionSettings
from spmdflow.failure.status_file import StatusFile
from spmdflow.runtime.call import Call, Ledger, OnDone, Pending, refuse_to_wait
from spmdflow.runtime.executor import failure_of, stay_until
from spmdflow.runtime.teardown import Teardown
from spmdflow.runtime.wire import Hub, Kind

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_TURN_MESSAGES = 256


class Io:
    """The controller's transport and its thread."""

    def __init__(self, hub: Hub, *, peers: Peers, settings: SessionSettings) -> None:
        self._hub = hub
        self._peers = peers
        self._settings = settings
        self.world_size = len(settings.ranks)
        self._members = frozenset(settings.ranks)
        self._nodes = peers.nodes()
        self.thread = threading.Thread(target=self._run, name="io", daemon=True)
        self._lock = threading.RLock()
        self._worker: int | None = None
        self._hello = hub.seal(Kind.HELLO)
        self._inbox: deque[Callable[[], None]] = deque()
        self._tickets = itertools.count(1)
        self._ledger = Ledger()
        self._collector = FailureCollector(
            peers, self._ledger, settings, show_stacks=self._show_stacks
        )
        self._teardown = Teardown(hub, self._collector)
        self._watch = SessionWatch(self._collector)
        self._stalls = self._collector.stalls
        self._status = StatusFile(
            settings.run_dir,
            lambda: self.post(partial(self._show_stacks, [])),
            settings.owns_run_dir,
        )
        self.met = Pending.of_no_call("start", self._await)
        """Done when every rank is connected."""
        self._closed = Pending.of_no_call("end", self._await)
        self._next_tick = self._next_beat = 0.0
        self._close_wanted = self._close_sent = self._finished = False
        self._handlers: dict[Kind, Callable[[int, Any], None]] = {
            Kind.HELLO: self._on_hello,
            Kind.REPLY: self._on_reply,
            Kind.FAILURE: lambda rank, failure: self._collector.add(failure),
            Kind.BEAT: lambda rank, body: self._stalls.note_heartbeat(rank, body, time.monotonic()),
            Kind.STOP: lambda rank, number: self._watch.on_signal(rank, number, time.monotonic()),
            Kind.ENDED: lambda rank, body: self._peers.add_end(*body),
            Kind.UNWOUND: self._on_unwound,
            Kind.BYE: self._on_bye,
        }

    # ---- called by the script

    @property
    def stop_requested(self) -> bool:
        """Whether the run was asked to save and end."""
        return self._watch.stop_requested

    def on_stop(self, say: Callable[[], str]) -> None:
        """Call say() when the run is asked to save and end, and log what it returns."""
        self._watch.on_stop = say

    @property
    def has_failed(self) -> bool:
        """Whether a failure is known."""
        return bool(self._collector.failures)

    def submit(self, call: Call, on_done: OnDone | None = None) -> Pending:
        """Send a call to its ranks, and return its `Pending` at once (any thread).

        on_done(replies) runs under the io lock when all ranks have replied. Calls are sent in the
        order of `submit`. RunFailed if the session has been unwound. MessageError, before anything
        is sent, if a command is not plain data or too large.
        """
        if self._teardown.cause is not None:
            raise RunFailed(self._teardown.cause.sentence())
        ticket = next(self._tickets)
        messages = self._encode(call, ticket)
        pending = Pending(call, self._await, on_done)
        self.post(partial(self._send, ticket, pending, messages))
        return pending

    def post(self, function: Callable[[], None]) -> None:
        """Run function under the io lock, after everything posted before (any thread).

        This thread runs it itself if the lock is free, which saves a thread switch. Otherwise the
        thread that has the lock, or the io thread, which is woken, does it. Exceptions of function
        end the run and are not raised here. Ignored once the session is over.
        """
        self._inbox.append(function)
        if not self._lock.acquire(blocking=False):
            self._hub.waiter.wake()
            return
        try:
            if self._worker is None and not self._finished:
                self._work()
        finally:
            self._lock.release()

    def node_of(self, rank: int) -> int:
        """The node that a rank runs on, as a number (any thread)."""
        return self._nodes[rank]

    def fail(self, failure: Failure) -> None:
        """End the run (any thread)."""
        self.post(lambda: self._collector.add(failure))

    def stay(self) -> None:
        """Wait for the end of a failed run; returns if the process outlives it (script)."""
        stay_until(self._teardown.unwound, lambda: bool(self._ledger.open))

    def close(self) -> None:
        """Wait until no call is open, then end the lanes of all ranks and wait until all have left.

        RunFailed if a failure ends the run meanwhile.
        """

        def want_close() -> None:
            self._close_wanted = True

        self.post(want_close)
        self._closed.result()

    def _encode(self, call: Call, ticket: int) -> list[tuple[int, bytes]]:
        """Return (rank, message) for each command of a call, in descending order of rank.

        A payload object that several ranks share is encoded once. AssertionError if the call has no
        commands or goes to a rank outside the session. MessageError if a payload is not plain data.
        """
        strangers = []
        for rank in call.commands:
            if rank not in self._members:
                strangers.append(rank)
        assert call.commands and not strangers, (call.label, strangers, self._settings.ranks)
        head = [ticket, call.number, call.lane, call.label]
        encoded: dict[int, bytes] = {}
        messages = []
        # the controller's own rank last: its lane takes the interpreter lock from the sender
        for rank in sorted(call.commands, reverse=True):
            payload = call.commands[rank]
            if id(payload) not in encoded:
                encoded[id(payload)] = self._hub.seal(Kind.COMMAND, [*head, payload])
            messages.append((rank, encoded[id(payload)]))
        return messages

    # ---- the io thread

    def _run(self) -> None:
        """Run the io thread: serve messages and clocks until the session ends, then clean up.

        Closes the sockets and the status file, and forgets calls that are still open. An exception
        is a failure of the controller: the run is ended, and this process exits with status 1.
        """
        try:
            self._peers.watch(self._hub.waiter)
            while not self._finished:
                self._step()
            with self._lock:
                self._peers.unwatch(self._hub.waiter)
                self._hub.close()
                self._ledger.open.clear()  # their errors hold the script's frames and its groups
            self._status.close()
        except BaseException as err:
            try:
                logger.exception("the io thread failed")
                failure = failure_of(err, self._settings.controller_rank, kind="controller")
                with self._lock:
                    self._end_run(failure)
            finally:
                leave(1)

    def _step(self) -> None:
        """Run the periodic checks if due, handle all posted functions and messages, then wait.

        Waits until a descriptor is readable or the next check is due (every 0.25 s).
        """
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_SECONDS
            self._tick(now)
        self._work()
        if not self._finished:
            self._notice(self._hub.waiter.wait(max(0.0, self._next_tick - time.monotonic())))

    def _notice(self, ready: list[int]) -> None:
        """Make the next tick due now if a connection was lost or a process of this node has ended.

        ready: the readable descriptors. After a lost connection, all connections are probed for
        some seconds.
        """
        lost = (not ready or self._hub.lost_descriptor in ready) and self._hub.any_lost()
        if lost:
            self._watch.on_connection_lost(time.monotonic())
        if self._peers.unwatch(self._hub.waiter, ready) or lost:
            self._next_tick = 0.0

    def _await(self, pending: Pending) -> None:
        """Wait until pending is done, because all ranks have replied or because it failed.

        RunFailed if the io thread has ended without completing it. ProtocolError if called by
        `on_done` or a posted function, which would wait for itself.
        """
        if self._worker == threading.get_ident():
            refuse_to_wait(pending)
        is_over = False
        while not pending.done:
            if is_over:
                raise RunFailed(
                    f"{pending.label}: the session is over; expected all ranks to answer"
                )
            pending.sleep(1.0)
            is_over = not self.thread.is_alive()  # before `done`: it may resolve this and end

    def _work(self) -> None:
        """Run all posted functions and handle received messages, under the io lock.

        After each message it runs what that message posted. It handles at most 256 messages, then
        lets the clocks run first. Exceptions become failures of the run. If `close` was called, it
        sends CLOSE once nothing is open.
        """
        with self._lock:
            self._call_guarded(self._work_through_inbox)
            for _ in range(_TURN_MESSAGES):
                if (message := self._hub.receive()) is None:
                    break
                self._call_guarded(self._handle, *message)
                if self._inbox:
                    self._call_guarded(self._work_through_inbox)
            else:
                self._hub.waiter.wake()  # the clocks first, then the rest
            if self._close_wanted:
                self._call_guarded(self._close_if_idle)

    def _call_guarded(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call function; an Exception becomes a failure of kind "controller", which ends the run.

        Meanwhile this thread counts as the io thread, in which waiting for a result is an error.
        """
        outer = self._worker
        self._worker = threading.get_ident()
        try:
            function(*arguments)
        except Exception as err:
            rank = self._settings.controller_rank
            self._collector.add(failure_of(err, rank, kind="controller"))
        finally:
            self._worker = outer

    def _work_through_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    # ---- messages

    def _handle(self, rank: int, data: bytes) -> None:
        """Decode a message, note that its sender is alive, and call the handler of its kind.

        Messages of unknown ranks, and those other than HELLO of ranks that have not connected yet,
        are dropped without decoding. A message of another run is dropped too.
        """
        is_here = rank in self._members and rank not in self._peers.missing
        if not (is_here or (rank in self._members and data == self._hello)):
            return  # not even decoded
        envelope = self._hub.open(data, rank)
        if envelope is not None:
            self._peers.note_message(rank, time.monotonic())
            kind, body = envelope
            self._handlers[kind](rank, body)

    def _send(self, ticket: int, pending: Pending, messages: list[tuple[int, bytes]]) -> None:
        """Register a call under its ticket and send its commands, or fail it if the run has ended.

        If the session was unwound, nothing is sent, and `pending.result` raises RunFailed. A rank
        that cannot be reached is recorded as dead ("its connection is lost"), and the other ranks
        still get their commands.
        """
        if self._teardown.cause is not None:
            pending.fail(RunFailed(self._teardown.cause.sentence()))
            return
        self._ledger.record_sent(ticket, pending, now=time.monotonic())
        for rank, message in messages:
            if not self._hub.send(rank, message):
                self._collector.add_death(rank, CONNECTION_LOST)

    def _on_hello(self, rank: int, _: Any) -> None:
        """Admit a rank that has connected; the last one starts the session.

        Then each rank gets WELCOME with the ranks and processes of its node, no more connections
        are accepted, the time limit of the start is lifted, and `met` is done.
        """
        self._hub.admit(rank)
        self._peers.missing.discard(rank)
        if self._peers.missing or self.met.done:
            return
        by_node = {}
        for first in set(self._nodes.values()):
            by_node[first] = self._hub.seal(Kind.WELCOME, self._peers.neighbours(first))
        for member, first in self._nodes.items():  # all are here: each hears who shares its node
            self._hub.send(member, by_node[first])
        self._watch.start_by = float("inf")
        self._hub.end_listening()
        self.met.resolve({})

    def _on_reply(self, rank: int, body: Any) -> None:
        """Record a rank's reply; after a call's last reply, run its on_done and mark it as done.

        body: [ticket, payload, fields of a `CallDuration`]. If on_done raises, the call stays
        undone and the run ends. Replies after the session was unwound are ignored.
        """
        ticket, payload, duration = body
        if self._teardown.cause is not None:
            return
        now = time.monotonic()
        pending = self._ledger.answer(
            rank, ticket, payload, now=now, duration=CallDuration(*duration)
        )
        if pending is None:
            return
        self._stalls.end_call(pending, now)
        if self._run_on_done(pending):
            pending.resolve(pending.replies)

    def _run_on_done(self, pending: Pending) -> bool:
        """Run the `on_done` of a call; return whether it succeeded.

        An Exception becomes a failure of kind "controller" with the call's label, number and script
        line, which ends the run.
        """
        call = pending.call
        try:
            pending.run_on_done()
        except Exception as err:
            failure = failure_of(err, self._settings.controller_rank, kind="controller")
            self._collector.add(
                replace(
                    failure,
                    label=call.label,
                    number=call.number,
                    lane=call.lane,
                    line=call.line,
                )
            )
            return False
        return True

    # ---- the end

    def _close_if_idle(self) -> None:
        """Send CLOSE to every rank, once, if no call is open and none is waiting to be sent.

        Not after a failure. From then on a rank that does not leave within the time limit is a
        failure.
        """
        if self._close_sent or self._ledger.open or self._inbox or self._collector.failures:
            return
        self._close_sent = True
        self._send_close()

    def _on_unwound(self, rank: int, _: Any) -> None:
        self._teardown.unwinding.discard(rank)
        if not self._teardown.unwinding:
            self._send_close()

    def _send_close(self) -> None:
        self._watch.begin_close(time.monotonic())
        for rank in self._settings.ranks:
            self._hub.send(rank, self._hub.seal(Kind.CLOSE))

    def _on_bye(self, rank: int, _: Any) -> None:
        """Record that a rank has left; after the last one `close` returns and this thread ends."""
        self._peers.left.add(rank)
        if not self._peers.remaining_ranks():
            self._finished = True
            self._closed.resolve({})

    # ---- clocks

    def _tick(self, now: float) -> None:
        """Do what is due every 0.25 s: heartbeats, status.json, time limits, ending a failed run.

        Handles waiting messages first, because a process that was stopped has not read them. Cuts
        connections on which a message never ends (a failure of their rank). Heartbeats and
        status.json come every beat_seconds. Call limits are not checked any more after a failure.
        """
        self._work()  # first: a process that was stopped has not read what came meanwhile
        with self._lock:
            for rank in self._hub.cut_endless():
                self._call_guarded(self._collector.add_endless_message, rank)
            if now >= self._next_beat:
                self._next_beat = now + self._settings.beat_seconds
                for rank in self._peers.remaining_ranks():
                    self._call_guarded(self._probe, rank)
                self._status.put(self._stalls.status(now))
            if not self._collector.failures:
                self._call_guarded(self._stalls.check, now)  # first: it notices that time was lost
            self._call_guarded(self._watch.check, now, self._probe)
            if self._teardown.is_due(now):
                self._end_failed_run(now)

    def _show_stacks(self, silent: list[int]) -> None:
        """Make all ranks write their stacks; the silent ones are asked by a signal."""
        for rank in self._settings.ranks:
            self._hub.send(rank, self._hub.seal(Kind.LOOK, silent))

    def _probe(self, rank: int) -> bool:
        return self._hub.send(rank, self._hub.seal(Kind.BEAT))

    def _end_failed_run(self, now: float) -> None:
        """End the processes of a failed run, or only the session if that can be unwound.

        Only the session ends if all processes are alive and the program around it continues
        (`can_unwind`). Unwinding waits for open calls if only the script has failed. Called again
        while ranks unwind: those that are too late become failures, after which the processes are
        ended.
        """
        if not self._collector.can_unwind:
            self._end_run(None)
        elif self._teardown.cause is not None:
            self._teardown.check_unwinding(now)
        elif not (self._ledger.open and self._collector.is_only_script):
            self._teardown.unwind(self._pending())

    def _end_run(self, failure: Failure | None) -> None:
        """Report the cause, end the other ranks, and exit with status 1; never returns.

        failure: added to the failures first, or None. The exit happens even if a step before it
        raises.
        """
        try:
            if failure:
                self._collector.add(failure)
            self._teardown.abort(self._pending())
        finally:
            leave(1)

    def _pending(self) -> list[Pending]:
        return [self.met, self._closed, *self._ledger.open.values()]
