"""What is known of other ranks: whose process is there, silent or gone, and what each still owes.

Each lane of a rank runs its commands in the order they were sent, so the oldest unanswered one
is the one that runs, and it started when it was sent or when the one before it was answered.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from spmdflow.runtime.process import Process
from spmdflow.runtime.wire import Waiter

logger = logging.getLogger(__name__)


class Peers:
    """Processes of ranks: of a session, or of one machine. Used by one thread at a time."""

    def __init__(
        self,
        processes: Mapping[int, Process],
        *,
        own_rank: int,
        heartbeat_seconds: float = float("inf"),
    ) -> None:
        """heartbeat_seconds: silence after which `warn_about_silence` warns."""
        self._processes = dict(processes)
        self._others = [rank for rank in processes if rank != own_rank]
        self._heartbeat_seconds = heartbeat_seconds
        self._heard = dict.fromkeys(processes, time.monotonic())
        self._missing = set(processes)
        self._left: set[int] = set()
        self._warned: set[int] = set()
        self._pidfds: dict[int, int] = {}
        self._ended: dict[int, str] = {}

    def watch(self, waiter: Waiter) -> None:
        """Let waiter return when a process of this machine ends."""
        for rank in self._others:
            if (pidfd := self._processes[rank].pidfd_or_none()) is not None:
                self._pidfds[pidfd] = rank
                waiter.watch(pidfd)

    def unwatch(self, waiter: Waiter, ready: Collection[int] | None = None) -> bool:
        """Stop watching: all, or those whose descriptor is ready (they ended). True: some."""
        done = [pidfd for pidfd in self._pidfds if ready is None or pidfd in ready]
        for pidfd in done:
            waiter.forget(pidfd)
            os.close(pidfd)
            del self._pidfds[pidfd]
        return bool(done)

    def arrived(self, rank: int) -> None:
        """Note that rank is connected."""
        self._missing.discard(rank)

    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return sorted(self._missing)

    def heard(self, rank: int, now: float) -> None:
        """Note a sign of life of rank."""
        self._heard[rank] = now
        if rank in self._warned:
            self._warned.discard(rank)
            logger.warning("rank %d is heard again", rank)

    def leaves(self, rank: int) -> None:
        """Note that rank said BYE: from here on its end is no failure."""
        self._left.add(rank)

    def staying(self) -> list[int]:
        """Ranks that have not said BYE, this one included."""
        return [rank for rank in self._processes if rank not in self._left]

    def ended(self) -> dict[int, str]:
        """Ranks whose process is known to have ended without BYE, and how."""
        for rank in self._others:
            process = self._processes[rank]
            if rank not in self._ended and process.has_ended():
                how = process.end_cause_or_none() or "ended (signal or status unknown)"
                self._ended[rank] = f"process {process.pid} {how}"
        return {rank: how for rank, how in self._ended.items() if rank not in self._left}

    def ended_elsewhere(self, rank: int, how: str) -> None:
        """Note what a neighbour of rank saw."""
        self._ended.setdefault(rank, how)

    def unreachable(self, probe: Callable[[int], bool]) -> list[int]:
        """Ranks of other machines that were connected and fail probe."""
        return [
            rank
            for rank in self._others
            if rank not in self._left and rank not in self._missing
            if not self._processes[rank].is_local() and not probe(rank)
        ]

    def warn_about_silence(self, now: float) -> None:
        """One warning for each rank that has been silent for the heartbeat limit."""
        for rank in self._others:
            silent = now - self._heard[rank]
            if silent > self._heartbeat_seconds and rank not in self._warned | self._left:
                self._warned.add(rank)
                logger.warning("rank %d: no sign of life for %.0f s, waiting on", rank, silent)

    def stopped(self, rank: int, now: float, *, silent_seconds: float) -> str | None:
        """Why rank counts as stopped, or None if it is alive."""
        process, silent = self._processes[rank], now - self._heard[rank]
        if process.is_stopped():
            return f"process {process.pid} is stopped (state {process.state()})"
        if rank in self._others and silent > silent_seconds:
            return f"process {process.pid} has been silent for {silent:.1f} s"
        return None

    def node(self, rank: int) -> str:
        """The machine of rank."""
        return self._processes[rank].node

    def nodes(self) -> dict[int, int]:
        """The machine of each rank as a number: that of the first rank there."""
        first: dict[str, int] = {}
        return {rank: first.setdefault(self.node(rank), rank) for rank in sorted(self._processes)}

    def on_node(self, node: str) -> dict[int, Process]:
        """Processes on one machine, by rank."""
        return {rank: process for rank, process in self._processes.items() if process.node == node}

    def kill(self, rank: int) -> None:
        """SIGKILL rank if it is one of these and runs on this machine."""
        if rank in self._processes and self._processes[rank].kill():
            logger.error("rank %d (process %d): sent SIGKILL", rank, self._processes[rank].pid)

    def local_survivors(self) -> list[int]:
        """Other ranks of this machine whose process has not ended."""
        return [
            rank
            for rank in self._others
            if self._processes[rank].is_local() and not self._processes[rank].has_ended()
        ]

    def has_remote(self) -> bool:
        """Whether some rank runs on another machine."""
        return any(not process.is_local() for process in self._processes.values())


GRACE_SECONDS = 2.0
"""A rank reports its own missed limits; the controller waits this much longer."""


@dataclass(slots=True)
class Entry:
    """One command on its way through one lane of one rank."""

    ticket: int
    number: int
    lane: str
    label: str
    seconds: float
    since: float
    """Earliest moment at which it can have started (time.monotonic())."""
    line: str = ""
    """The script's line that gave the order."""


class Ledger:
    """Unanswered commands by rank and lane."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], deque[Entry]] = {}

    def sent(self, rank: int, entry: Entry) -> None:
        """Note that entry was sent to rank."""
        lane = self._lanes.get((rank, entry.lane))
        if lane is None:
            lane = self._lanes[rank, entry.lane] = deque()
        lane.append(entry)

    def answered(self, rank: int, lane: str, ticket: int, *, now: float) -> bool:
        """Note an answer; False if it is not the one that this lane of rank owes next."""
        entries = self._lanes.get((rank, lane))
        if not entries or entries[0].ticket != ticket:
            return False
        entries.popleft()
        if entries:
            entries[0].since = max(entries[0].since, now)
        return True

    def running(self, rank: int) -> list[Entry]:
        """What rank is running, as far as is known: at most one entry per lane."""
        lanes = (self._lanes.get((rank, lane)) for lane in ("compute", "transfer"))
        return [entries[0] for entries in lanes if entries]

    def overdue(self, now: float) -> Iterator[tuple[int, Entry]]:
        """Ranks and entries whose limit passed more than GRACE_SECONDS ago."""
        for (rank, _), entries in self._lanes.items():
            if entries and now > entries[0].since + entries[0].seconds + GRACE_SECONDS:
                yield rank, entries[0]

    def owing(self) -> set[int]:
        """Ranks that owe an answer."""
        return {rank for (rank, _), entries in self._lanes.items() if entries}
