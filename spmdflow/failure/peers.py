"""What is known of other ranks: which processes live, are silent or gone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from spmdflow.failure.process import Process

logger = logging.getLogger(__name__)

_STACK_SECONDS = 0.3
"""Time for a process to write its stacks before it is killed."""


class DescriptorWaiter(Protocol):
    """What waits until descriptors are readable (`Waiter` in runtime/wire.py)."""

    def watch(self, descriptor: int) -> None:
        """Wait for this descriptor too."""

    def forget(self, descriptor: int) -> None:
        """Undo `watch`."""


class Peers:
    """The processes of several ranks: of a session or of one node. Used by one thread at a time."""

    def __init__(
        self,
        processes: Mapping[int, Process],
        *,
        own_rank: int,
        heartbeat_seconds: float = float("inf"),
    ) -> None:
        """processes: by rank. heartbeat_seconds: silence after which a warning is logged."""
        self.processes = dict(processes)
        self.missing = set(processes)
        """Ranks that have not connected yet."""
        self.left: set[int] = set()
        """Ranks that have sent BYE. Their end is no failure."""
        self._others = [rank for rank in processes if rank != own_rank]
        self._heartbeat_seconds = heartbeat_seconds
        self._last_message = dict.fromkeys(processes, time.monotonic())
        self._warned: set[int] = set()
        self._pidfds: dict[int, int] = {}
        self._ended: dict[int, str] = {}

    def watch(self, waiter: DescriptorWaiter) -> None:
        """Let waiter return when another process of this node ends.

        Opens a pidfd for each, which `unwatch` closes. Processes that have ended already are
        skipped.
        """
        for rank in self._others:
            if (pidfd := self.processes[rank].pidfd_or_none()) is not None:
                self._pidfds[pidfd] = rank
                waiter.watch(pidfd)

    def unwatch(self, waiter: DescriptorWaiter, ready: Collection[int] | None = None) -> bool:
        """Stop watching processes and close their pidfds; return whether there were any.

        ready: readable descriptors; only the processes of these, which have ended, are unwatched.
        None: all are.
        """
        pidfds = []
        for pidfd in self._pidfds:
            if ready is None or pidfd in ready:
                pidfds.append(pidfd)
        for pidfd in pidfds:
            waiter.forget(pidfd)
            os.close(pidfd)
            del self._pidfds[pidfd]
        return bool(pidfds)

    def note_message(self, rank: int, now: float) -> None:
        """Record that a message of rank arrived at `now`.

        Logs it if the rank's silence had been warned about, so that it can be warned about again.
        """
        self._last_message[rank] = now
        if rank in self._warned:
            self._warned.discard(rank)
            logger.warning("rank %d sends heartbeats again", rank)

    def remaining_ranks(self) -> list[int]:
        """Return the ranks that have not sent BYE, including this process's own."""
        ranks = []
        for rank in self.processes:
            if rank not in self.left:
                ranks.append(rank)
        return ranks

    def ended_ranks(self) -> dict[int, str]:
        """Return rank -> how its process ended, for other ranks that ended without BYE.

        Looks at processes of this node, and remembers the first answer. Ranks of other nodes are
        included if `add_end` reported them. "process 123 killed by SIGKILL", or "ended (signal or
        status unknown)".
        """
        for rank in self._others:
            process = self.processes[rank]
            if rank not in self._ended and process.has_ended():
                how = process.end_cause_or_none() or "ended (signal or status unknown)"
                self._ended[rank] = f"process {process.pid} {how}"
        return {rank: how for rank, how in self._ended.items() if rank not in self.left}

    def add_end(self, rank: int, how: str) -> None:
        """Note how the process of rank ended, as another rank of its node reported."""
        self._ended.setdefault(rank, how)

    def unreachable_ranks(self, probe: Callable[[int], bool]) -> list[int]:
        """Return ranks of other nodes that were connected, have not left, and fail probe(rank)."""
        unreachable = []
        for rank in self._others:
            is_connected = rank not in self.left and rank not in self.missing
            if is_connected and not self.processes[rank].is_local() and not probe(rank):
                unreachable.append(rank)
        return unreachable

    def silence(self, rank: int, now: float) -> float:
        """Seconds since the last message of rank."""
        return now - self._last_message[rank]

    def shift(self, seconds: float) -> None:
        """Do not count these seconds as silence, because this process was stopped meanwhile."""
        for rank in self._last_message:
            self._last_message[rank] += seconds

    def warn_about_silence(self, now: float) -> None:
        """Log a warning for each other rank that has been silent for more than `heartbeat_seconds`.

        A rank is warned about again only after it has sent a message (`note_message`). Ranks that
        have left are skipped.
        """
        for rank in self._others:
            silent = self.silence(rank, now)
            if silent > self._heartbeat_seconds and rank not in self._warned | self.left:
                self._warned.add(rank)
                logger.warning(
                    "rank %d has been silent for %.0f s: %s; still waiting for it",
                    rank,
                    silent,
                    self.processes[rank].describe(),
                )

    def stop_reason_or_none(self, rank: int, now: float, *, silent_seconds: float) -> str | None:
        """Return why rank counts as stopped, in words; None if it does not.

        It does if its process is stopped by a signal or debugger, or if it is another rank that has
        been silent for more than silent_seconds.
        """
        process = self.processes[rank]
        silent = self.silence(rank, now)
        if process.is_stopped():
            return process.describe()
        if rank in self._others and silent > silent_seconds:
            return f"process {process.pid} has been silent for {silent:.1f} s"
        return None

    def nodes(self) -> dict[int, int]:
        """Return rank -> its node, identified by the lowest rank on that node."""
        first_ranks: dict[str, int] = {}
        nodes = {}
        for rank, process in sorted(self.processes.items()):
            nodes[rank] = first_ranks.setdefault(process.node, rank)
        return nodes

    def neighbours(self, rank: int) -> dict[int, Process]:
        """Return rank -> process for all ranks on the node of `rank`, including itself."""
        node = self.processes[rank].node
        processes = {}
        for other, process in self.processes.items():
            if process.node == node:
                processes[other] = process
        return processes

    def kill(self, ranks: Collection[int]) -> None:
        """Send SIGKILL to the processes of `ranks` that run on this node, and log each.

        First it makes them write their stacks, continues stopped ones, and waits 0.3 s if any is
        alive. Ranks that are unknown, on other nodes or have ended are skipped.
        """
        processes = {}
        for rank in ranks:
            if rank in self.processes:
                processes[rank] = self.processes[rank]
        is_any_alive = False
        for process in processes.values():
            if process.show_stacks() and process.wake():
                is_any_alive = True
        if is_any_alive:
            time.sleep(_STACK_SECONDS)
        for rank, process in processes.items():
            if process.kill():
                logger.error("sent SIGKILL to rank %d (process %d)", rank, process.pid)

    def local_survivors(self) -> list[int]:
        """Return the other ranks of this node whose process has not ended."""
        survivors = []
        for rank in self._others:
            process = self.processes[rank]
            if process.is_local() and not process.has_ended():
                survivors.append(rank)
        return survivors
