"""What the script's side hands to a transport: orders, and what it gets back: pending replies.

An order is a set of commands that belong together, one per rank. `Io` carries orders over
sockets. `InprocTransport` (`--inproc`: one process, no threads, no sockets) runs them at once, so
that an exception in an operation reaches the script as it is, and `breakpoint()` works anywhere.
Both promise the same order of events: what an `on_done` submits runs when that one returns, in the
order of submission.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol

from spmdflow.errors import ProtocolError, RunFailed
from spmdflow.failure.signals import STOP_SIGNALS
from spmdflow.runtime.executor import Operation, find_operation

logger = logging.getLogger(__name__)

Replies = dict[int, dict[str, Any]]
"""Reply payload by rank."""


@dataclass(frozen=True)
class Order:
    """Commands for some ranks, which belong together."""

    number: int
    """Call number (compute lane) or release number (transfer lane)."""
    lane: str
    """compute, transfer or files."""
    label: str
    """What a user calls it, such as "actor.generate_sequences"."""
    commands: Mapping[int, dict[str, Any]]
    """Payload by rank; the same object for several ranks is encoded once."""
    seconds: float | None
    """Its limit; None: that of run.call_seconds=null (runtime/limit.py)."""
    on_done: Callable[[Replies], None] | None = None
    """Runs in the io thread once all ranks have replied, before `Pending` is done."""
    phase: str = "train"
    """train or eval."""
    line: str = ""
    """The script's line that gave it, for messages."""
    kind: str = ""
    """Orders of one kind take about as long; empty: those with the same label."""


class Pending:
    """The replies of an order, when they are there."""

    def __init__(self, label: str, wait: Callable[[Pending], None]) -> None:
        """wait(pending) returns when pending is done, or raises RunFailed."""
        self.label = label
        self._wait = wait
        self._replies: Replies = {}
        self._failure: RunFailed | None = None
        self._latch = threading.Lock()
        self._latch.acquire()

    @property
    def done(self) -> bool:
        """Whether `result` returns (or raises) at once."""
        return not self._latch.locked()

    def result(self) -> Replies:
        """Wait for the replies; RunFailed if the run fails. The order's limits bound the wait."""
        if self._latch.locked():
            self._wait(self)
        if self._failure is not None:
            raise self._failure
        return self._replies

    def sleep(self, seconds: float) -> None:
        """Wait until done, at most seconds, while another thread receives."""
        if self._latch.acquire(timeout=seconds):
            self._latch.release()

    def resolve(self, replies: Replies) -> None:
        """Hand over the replies (io thread, once; too late after `fail`)."""
        if self._latch.locked():
            self._replies = replies
            self._latch.release()

    def fail(self, failure: RunFailed) -> None:
        """Let `result` raise, if it would have to wait (io thread)."""
        if self._latch.locked():
            self._failure = failure
            self._latch.release()


class Transport(Protocol):
    """What carries orders to ranks: sockets (`Io`) or nothing at all (`InprocTransport`).

    Posted functions and `on_done` run "in the io thread": one at a time, in order. A script that
    submits does that work itself, under the io thread's lock, which saves a thread switch.
    """

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def stop_requested(self) -> bool:
        """Whether the run was asked to save and end (by a signal); read it between steps."""

    def on_stop(self, say: Callable[[], str]) -> None:
        """Call say() when the run is asked to save and end, and log what it returns."""

    def submit(self, order: Order) -> Pending:
        """Send an order; MessageError, before anything is sent, if it is not plain data."""

    def post(self, function: Callable[[], None]) -> None:
        """Run function in the io thread, after everything submitted before."""

    def node_of(self, rank: int) -> int:
        """The node that a rank runs on, as a number."""

    def close(self) -> None:
        """Wait for all orders, then end every rank's lanes."""


def names_in(part: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name that the call sees, stored name) of every column of a part of the inputs."""
    return part.get("seen") or [(name, name) for name in part["columns"]]


def refuse_to_wait(pending: Pending) -> None:
    """ProtocolError of a wait that could never end: the waiting code itself is in the way."""
    raise ProtocolError(
        f"{pending.label}: its result was asked for inside of on_done or a posted function; "
        f"expected that only in the script; read the replies that on_done is given"
    )


class ImmediateTransport:
    """What transports without threads share: what is posted runs at once, and in order."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._is_running = False
        self.stop_requested = False
        """Set by `stop_on_signals`; the script reads it between steps."""
        self.say_stop: Callable[[], str] = lambda: "saving and stopping"

    def post(self, function: Callable[[], None]) -> None:
        """Run function after everything submitted before."""
        self._queue.append(function)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._queue:
                self._queue.popleft()()
        finally:
            self._is_running = False
            self._queue.clear()

    def on_stop(self, say: Callable[[], str]) -> None:
        """Call say() when the run is asked to save and end, and log what it returns."""
        self.say_stop = say

    def close(self) -> None:
        """Nothing is left to end."""


class InprocTransport(ImmediateTransport):
    """Runs the commands of rank 0 in the caller."""

    world_size = 1

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        super().__init__()
        self._operations = operations

    def submit(self, order: Order) -> Pending:
        """Run an order; what it raises is raised here."""
        pending = Pending(order.label, refuse_to_wait)
        self.post(partial(self._run_order, order, pending))
        return pending

    def node_of(self, rank: int) -> int:
        """All on this node."""
        return 0

    def _run_order(self, order: Order, pending: Pending) -> None:
        replies = {}
        for rank, payload in order.commands.items():
            assert rank == 0, (order.label, rank)
            operation = find_operation(self._operations, order.label, payload)
            replies[rank] = operation(payload, order.number)
        if order.on_done:
            order.on_done(replies)
        pending.resolve(replies)


@contextlib.contextmanager
def stop_on_signals(transport: InprocTransport) -> Iterator[None]:
    """Within the context signals ask the script to save and end after its step, as under torchrun.

    A second Ctrl-C is a KeyboardInterrupt. A signal that was ignored before stays so. Only a main
    thread may handle signals; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        again = ""
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            again = "; press Ctrl-C again to stop at once"
        logger.warning(
            "asked to end by %s: %s%s", STOP_SIGNALS[number], transport.say_stop(), again
        )
        transport.stop_requested = True

    before: dict[int, Any] = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
