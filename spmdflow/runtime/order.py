"""What the script's side hands to a transport: orders, and what it gets back: pending replies.

An order is a set of commands that belong together, one per rank. `Io` carries orders over
sockets, `InprocTransport` runs them on the spot; both promise the same order of events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spmdflow.errors import ProtocolError, RunFailed

Replies = dict[int, dict[str, Any]]
"""Reply payload by rank."""


@dataclass(frozen=True)
class Order:
    """Commands for some ranks, which belong together."""

    number: int
    """Call number (compute lane) or release number (transfer lane)."""
    lane: str
    """compute or transfer."""
    label: str
    """What a user calls it, such as "actor.generate_sequences"."""
    commands: Mapping[int, dict[str, Any]]
    """Payload by rank; the same object for several ranks is encoded once."""
    seconds: float
    """Limit on each rank, from the moment it starts there."""
    on_done: Callable[[Replies], None] | None = None
    """Runs in the io thread once all ranks have replied, before `Pending` is done."""
    phase: str = "train"
    """train or eval."""
    line: str = ""
    """The script's line that gave it, for messages."""


class Pending:
    """The replies of an order, when they are there."""

    def __init__(self, label: str, wait: Callable[[Pending], None]) -> None:
        """wait(pending) returns when pending is done, or raises RunFailed."""
        self.label, self._wait = label, wait
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
        """Whether the run was asked to save and end (SIGTERM); read it between steps."""

    def submit(self, order: Order) -> Pending:
        """Send an order; MessageError, before anything is sent, if it is not plain data."""

    def post(self, function: Callable[[], None]) -> None:
        """Run function in the io thread, after everything submitted before."""

    def node_of(self, rank: int) -> int:
        """The machine that a rank runs on, as a number."""

    def close(self) -> None:
        """Wait for all orders, then end every rank's lanes."""


def names_in(part: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name that the call sees, stored name) of every column of a part of the inputs."""
    return part.get("seen") or [(name, name) for name in part["columns"]]


def too_early(pending: Pending) -> ProtocolError:
    """The error of a wait that could never end: the waiting code itself is in the way."""
    return ProtocolError(
        f"{pending.label}: its result was asked for inside of on_done or a posted function; "
        f"expected that only in the script; read the replies that on_done is given"
    )
