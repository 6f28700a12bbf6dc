"""A rank's socket, shared by the compute lane and the comm thread so that no call pays a hop.

While the compute lane is idle, or waits for rows, it receives for itself: a command, or the
transfer that brings those rows, is run by the thread that its arrival wakes, and the reply leaves
from there. While it is busy the comm thread receives, so that transfers, ABORT and CLOSE are
never late. The turn passes by adding the socket's descriptor to the comm thread's epoll set or
taking it out, which wakes nobody. One lock guards the socket (libzmq allows several threads as
long as their calls do not overlap).

Which transfers the compute lane runs: those that bring it rows and ask it for none
(`Command.precedes_call`), while it waits for rows or has no command. Such a transfer is released
just before the call that needs its rows, or while that call waits for them, so nothing that could
run is held up. And nothing can wait in a circle: a transfer still waits for earlier transfers
only, which their ranks run in this way or in the transfer lane's own thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from spmdflow.runtime.executor import Command, SharedLane, Unwound
from spmdflow.runtime.wire import Endpoint, Waiter

_FOREVER = float("inf")
_IDLE_SECONDS = 60.0
"""The idle lane's wait; the comm thread watches meanwhile, so its length does not matter."""


class Link:
    """Sends from any thread; receives in the compute lane or the comm thread, by turns."""

    def __init__(
        self, endpoint: Endpoint, take: Callable[[bytes], None], transfers: SharedLane
    ) -> None:
        """take is given every message, in order, by whichever thread received it."""
        self._endpoint, self._take, self._transfers = endpoint, take, transfers
        self._lock = threading.RLock()
        self._lane_receives = self._awaits_rows = self._is_over = False
        self._riding: list[bytes] = []
        self._commands: deque[Command | None] = deque()
        self._lane_waiter = Waiter()
        self._lane_waiter.watch(endpoint.descriptor)
        self.waiter = Waiter()
        """What the comm thread waits on."""
        self.waiter.watch(endpoint.descriptor)
        self.waiter.watch(endpoint.lost.descriptor)

    def send(self, data: bytes) -> None:
        """Queue data for the controller, behind what was to ride on it (any thread)."""
        with self._lock:
            unnoticed = self._endpoint.send(*self._riding, data)
            self._riding.clear()
        if unnoticed:
            (self._lane_waiter if self._lane_receives else self.waiter).wake()

    def send_with_next(self, data: bytes) -> None:
        """Let data ride on the next `send`, which saves a message; somebody must send soon."""
        with self._lock:
            self._riding.append(data)

    @property
    def has_riders(self) -> bool:
        """Whether something waits for the next `send`."""
        return bool(self._riding)

    def put(self, command: Command | None) -> None:
        """Append a command for the compute lane; called by `take`."""
        if not self._is_over:
            self._commands.append(command)

    def unwind(self) -> None:
        """Forget what has not begun, but for what needs everybody; `wait_until` raises Unwound."""
        self._is_over = True
        left = [command for command in self._commands if command and command.needs_everybody]
        self._commands = deque([*left, None])
        self._transfers.drop()
        self.wake()

    def put_transfer(self, command: Command | None) -> None:
        """Append a command for the transfer lane; called by `take`."""
        if command is None or self._is_over:
            self._transfers.wake(end=True)
            return
        is_next = self._awaits_rows or not self._commands
        here = command.precedes_call and self._lane_receives and is_next
        self._transfers.put(command, here=here)

    def next_command(self) -> Command | None:
        """The compute lane's next command; None is the end (compute lane only)."""
        while not self._commands:
            self._receive_in_lane(lambda: bool(self._commands), _FOREVER)
            self._transfers.run_here(lambda: False)
        return self._commands.popleft()

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Receive until condition() or seconds have passed; says which (compute lane only).

        Transfers that arrive meanwhile are run by this thread, up to the one it waited for.
        Unwound if the session ends before.
        """
        until = time.monotonic() + seconds
        self._awaits_rows = True
        while not condition() and time.monotonic() < until:
            self._receive_in_lane(condition, until)
            self._transfers.run_here(condition)
            if self._is_over:
                raise Unwound
        self._awaits_rows = False
        return condition()

    def wake(self) -> None:
        """Let `wait_until` look at its condition again (any thread)."""
        if self._lane_receives:
            self._lane_waiter.wake()

    def _receive_in_lane(self, condition: Callable[[], bool], until: float) -> None:
        with self._lock:
            self._lane_receives = True
            self.waiter.forget(self._endpoint.descriptor)
        try:
            self._drain()
            while not (condition() or self._is_over or self._transfers.has_work_here()):
                if (left := until - time.monotonic()) <= 0:
                    break
                self._lane_waiter.wait(min(left, _IDLE_SECONDS))
                self._drain()
        finally:
            with self._lock:
                self._lane_receives = False
                self.waiter.watch(self._endpoint.descriptor)

    def receive(self) -> None:
        """Take what is there, if it is the comm thread's turn (comm thread only)."""
        with self._lock:
            if not self._lane_receives:
                self._drain()

    def _drain(self) -> None:
        """Take every message that is there."""
        with self._lock:
            while (envelopes := self._endpoint.receive()) is not None:
                for data in envelopes:
                    self._take(data)

    def lost_connection(self, ready: list[int]) -> bool:
        """Whether the connection was lost; ready: what `waiter.wait` returned."""
        if ready and self._endpoint.lost.descriptor not in ready:
            return False
        return self._endpoint.lost.any_new()

    def close(self) -> None:
        """Send what is queued and give everything back; both threads are done with it."""
        self._endpoint.close()
        self.waiter.close()
        self._lane_waiter.close()
