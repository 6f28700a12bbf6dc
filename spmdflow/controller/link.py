"""A rank's socket, shared by the compute lane and the comm thread so that no call pays a hop.

While the compute lane is idle it receives for itself: a command is run by the thread that its
arrival wakes, and the reply leaves from there. While it is busy the comm thread receives, so
that transfers, ABORT and CLOSE are never late. The turn passes by adding the socket's descriptor
to the comm thread's epoll set or taking it out, which wakes nobody. One lock guards the socket
(libzmq allows several threads as long as their calls do not overlap).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from spmdflow.controller.executor import Command
from spmdflow.controller.waiter import Waiter
from spmdflow.controller.wire import Endpoint

_IDLE_SECONDS = 60.0
"""The idle lane's wait; the comm thread watches meanwhile, so its length does not matter."""


class Link:
    """Sends from any thread; receives in the compute lane or the comm thread, by turns."""

    def __init__(self, endpoint: Endpoint, take: Callable[[bytes], None]) -> None:
        """take is given every message, in order, by whichever thread received it."""
        self._endpoint, self._take = endpoint, take
        self._lock = threading.RLock()
        self._lane_receives = False
        self._commands: deque[Command | None] = deque()
        self._lane_waiter = Waiter()
        self._lane_waiter.watch(endpoint.descriptor)
        self.waiter = Waiter()
        """What the comm thread waits on."""
        self.waiter.watch(endpoint.descriptor)
        self.waiter.watch(endpoint.lost.descriptor)

    def send(self, data: bytes) -> None:
        """Queue data for the controller (any thread)."""
        with self._lock:
            unnoticed = self._endpoint.send(data)
        if unnoticed:
            (self._lane_waiter if self._lane_receives else self.waiter).wake()

    def put(self, command: Command | None) -> None:
        """Append a command for the compute lane; called by `take`."""
        self._commands.append(command)

    def next_command(self) -> Command | None:
        """The compute lane's next command; None is the end (compute lane only)."""
        if not self._commands:
            self._receive_in_lane()
        return self._commands.popleft()

    def _receive_in_lane(self) -> None:
        with self._lock:
            self._lane_receives = True
            self.waiter.forget(self._endpoint.descriptor)
        try:
            self._drain()
            while not self._commands:
                self._lane_waiter.wait(_IDLE_SECONDS)
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
            while (data := self._endpoint.receive()) is not None:
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
