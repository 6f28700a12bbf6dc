"""What a rank knows of other ranks' processes: who is here, who is silent, who is gone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping

from spmdflow.runtime.process import Process
from spmdflow.runtime.waiter import Waiter

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
