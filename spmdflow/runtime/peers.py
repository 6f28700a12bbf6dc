"""What is known of other ranks: which processes live, are silent or gone; which replies they owe.

Each lane of a rank runs its commands in the order they were sent, so the oldest unanswered one
is the one that runs, and it started when it was sent or when the one before it was answered.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from spmdflow.runtime.order import Order, Pending, Replies
from spmdflow.runtime.process import Process
from spmdflow.runtime.wire import Waiter

logger = logging.getLogger(__name__)


class Peers:
    """Processes of ranks: of a session, or of one node. Used by one thread at a time."""

    def __init__(
        self,
        processes: Mapping[int, Process],
        *,
        own_rank: int,
        heartbeat_seconds: float = float("inf"),
    ) -> None:
        """heartbeat_seconds: silence after which `warn_about_silence` warns."""
        self.processes = dict(processes)
        self.missing = set(processes)
        """Ranks that have not connected yet."""
        self.left: set[int] = set()
        """Ranks that said BYE: from here on their end is no failure."""
        self._others = [rank for rank in processes if rank != own_rank]
        self._heartbeat_seconds = heartbeat_seconds
        self._heard = dict.fromkeys(processes, time.monotonic())
        self._warned: set[int] = set()
        self._pidfds: dict[int, int] = {}
        self._ended: dict[int, str] = {}

    def watch(self, waiter: Waiter) -> None:
        """Let waiter return when a process of this node ends."""
        for rank in self._others:
            if (pidfd := self.processes[rank].pidfd_or_none()) is not None:
                self._pidfds[pidfd] = rank
                waiter.watch(pidfd)

    def unwatch(self, waiter: Waiter, ready: Collection[int] | None = None) -> bool:
        """Stop watching: all, or those whose descriptor is ready (they ended). True: any did."""
        done = [pidfd for pidfd in self._pidfds if ready is None or pidfd in ready]
        for pidfd in done:
            waiter.forget(pidfd)
            os.close(pidfd)
            del self._pidfds[pidfd]
        return bool(done)

    def heard(self, rank: int, now: float) -> None:
        """Note a message or heartbeat of rank."""
        self._heard[rank] = now
        if rank in self._warned:
            self._warned.discard(rank)
            logger.warning("rank %d is heard again", rank)

    def staying(self) -> list[int]:
        """Ranks that have not said BYE, this one included."""
        return [rank for rank in self.processes if rank not in self.left]

    def ended(self) -> dict[int, str]:
        """Ranks whose process is known to have ended without BYE, and how."""
        for rank in self._others:
            process = self.processes[rank]
            if rank not in self._ended and process.has_ended():
                how = process.end_cause_or_none() or "ended (signal or status unknown)"
                self._ended[rank] = f"process {process.pid} {how}"
        return {rank: how for rank, how in self._ended.items() if rank not in self.left}

    def ended_elsewhere(self, rank: int, how: str) -> None:
        """Note what a neighbour of rank saw."""
        self._ended.setdefault(rank, how)

    def unreachable(self, probe: Callable[[int], bool]) -> list[int]:
        """Ranks of other nodes that were connected and fail probe."""
        return [
            rank
            for rank in self._others
            if rank not in self.left and rank not in self.missing
            if not self.processes[rank].is_local() and not probe(rank)
        ]

    def warn_about_silence(self, now: float) -> None:
        """One warning for each rank that has been silent for the heartbeat limit."""
        for rank in self._others:
            silent = now - self._heard[rank]
            if silent > self._heartbeat_seconds and rank not in self._warned | self.left:
                self._warned.add(rank)
                logger.warning("rank %d: no sign of life for %.0f s, waiting on", rank, silent)

    def stopped(self, rank: int, now: float, *, silent_seconds: float) -> str | None:
        """Why rank counts as stopped, or None if it is alive."""
        process, silent = self.processes[rank], now - self._heard[rank]
        if process.is_stopped():
            return f"process {process.pid} is stopped (state {process.state()})"
        if rank in self._others and silent > silent_seconds:
            return f"process {process.pid} has been silent for {silent:.1f} s"
        return None

    def nodes(self) -> dict[int, int]:
        """The node of each rank as a number: that of the first rank there."""
        first: dict[str, int] = {}
        ordered = sorted(self.processes.items())
        return {rank: first.setdefault(process.node, rank) for rank, process in ordered}

    def neighbours(self, rank: int) -> dict[int, Process]:
        """Processes on the node of rank, by rank."""
        node = self.processes[rank].node
        return {other: process for other, process in self.processes.items() if process.node == node}

    def kill(self, rank: int) -> None:
        """SIGKILL rank if it is one of these and runs on this node."""
        if rank in self.processes and self.processes[rank].kill():
            logger.error("rank %d (process %d): sent SIGKILL", rank, self.processes[rank].pid)

    def local_survivors(self) -> list[int]:
        """Other ranks of this node whose process has not ended."""
        local = (rank for rank in self._others if self.processes[rank].is_local())
        return [rank for rank in local if not self.processes[rank].has_ended()]


GRACE_SECONDS = 2.0
"""A rank reports its own missed limits; the controller waits this much longer."""


@dataclass(slots=True)
class Sent:
    """An order that is on its way."""

    order: Order
    pending: Pending
    time: float = 0.0
    """When it was sent (time.monotonic())."""
    replies: Replies = field(default_factory=dict)


class Ledger:
    """Orders that lack replies, and what each lane of each rank owes of them, oldest first."""

    def __init__(self) -> None:
        self.open: dict[int, Sent] = {}
        """By ticket."""
        self._owed: defaultdict[tuple[int, str], deque[int]] = defaultdict(deque)
        self._free_since: dict[tuple[int, str], float] = {}
        """When a lane of a rank gave its last answer."""

    def send(self, ticket: int, sent: Sent, *, now: float) -> None:
        """Note that an order was sent to its ranks."""
        sent.time, self.open[ticket] = now, sent
        for rank in sent.order.commands:
            self._owed[rank, sent.order.lane].append(ticket)

    def answer(
        self, rank: int, ticket: int, payload: dict[str, object], *, now: float
    ) -> Sent | None:
        """Note an answer, the next that its lane owes; returns the order once all have answered."""
        sent = self.open[ticket]
        lane = (rank, sent.order.lane)
        assert self._owed[lane] and self._owed[lane][0] == ticket, (lane, ticket, sent.order.label)
        self._owed[lane].popleft()
        self._free_since[lane], sent.replies[rank] = now, payload
        if len(sent.replies) < len(sent.order.commands):
            return None
        return self.open.pop(ticket)

    def running(self, rank: int) -> list[Order]:
        """What rank is running, as far as is known: at most one order per lane."""
        owed = (self._owed.get((rank, lane)) for lane in ("compute", "transfer", "files"))
        return [self.open[tickets[0]].order for tickets in owed if tickets]

    def overdue(self, now: float) -> Iterator[tuple[int, Order]]:
        """Ranks and orders whose limit passed more than GRACE_SECONDS ago."""
        for lane, tickets in self._owed.items():
            if tickets:
                sent = self.open[tickets[0]]
                start = max(sent.time, self._free_since.get(lane, 0.0))
                if now > start + sent.order.seconds + GRACE_SECONDS:
                    yield lane[0], sent.order

    def owing(self) -> set[int]:
        """Ranks that owe an answer."""
        return {rank for (rank, _), tickets in self._owed.items() if tickets}
