"""What is known of other ranks: which processes live, are silent or gone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping

from spmdflow.failure.process import Process
from spmdflow.runtime.wire import Waiter

logger = logging.getLogger(__name__)

_STACK_SECONDS = 0.3
"""A process that is killed gets this long to write its stacks."""


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
        done = []
        for pidfd in self._pidfds:
            if ready is None or pidfd in ready:
                done.append(pidfd)
        for pidfd in done:
            waiter.forget(pidfd)
            os.close(pidfd)
            del self._pidfds[pidfd]
        return bool(done)

    def note_message(self, rank: int, now: float) -> None:
        """Note a message or heartbeat of rank."""
        self._heard[rank] = now
        if rank in self._warned:
            self._warned.discard(rank)
            logger.warning("rank %d is heard again", rank)

    def staying(self) -> list[int]:
        """Ranks that have not said BYE, this one included."""
        result = []
        for rank in self.processes:
            if rank not in self.left:
                result.append(rank)
        return result

    def ended_ranks(self) -> dict[int, str]:
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
        result = []
        for rank in self._others:
            if (rank not in self.left and rank not in self.missing) and (
                not self.processes[rank].is_local() and not probe(rank)
            ):
                result.append(rank)
        return result

    def silence(self, rank: int, now: float) -> float:
        """Seconds since rank was heard."""
        return now - self._heard[rank]

    def shift(self, seconds: float) -> None:
        """This process was stopped meanwhile: nobody else was silent for as long."""
        self._heard = {rank: heard + seconds for rank, heard in self._heard.items()}

    def warn_about_silence(self, now: float) -> None:
        """One warning for each rank that has been silent for the heartbeat limit."""
        for rank in self._others:
            silent = self.silence(rank, now)
            if silent > self._heartbeat_seconds and rank not in self._warned | self.left:
                self._warned.add(rank)
                logger.warning(
                    *("rank %d: no sign of life for %.0f s: %s; waiting on", rank, silent),
                    self.processes[rank].describe(),
                )

    def why_stopped(self, rank: int, now: float, *, silent_seconds: float) -> str | None:
        """Why rank counts as stopped, or None if it is alive."""
        process = self.processes[rank]
        silent = now - self._heard[rank]
        if process.is_stopped():
            return process.describe()
        if rank in self._others and silent > silent_seconds:
            return f"process {process.pid} has been silent for {silent:.1f} s"
        return None

    def nodes(self) -> dict[int, int]:
        """The node of each rank as a number: that of the first rank there."""
        first: dict[str, int] = {}
        ordered = sorted(self.processes.items())
        result = {}
        for rank, process in ordered:
            result[rank] = first.setdefault(process.node, rank)
        return result

    def neighbours(self, rank: int) -> dict[int, Process]:
        """Processes on the node of rank, by rank."""
        node = self.processes[rank].node
        result = {}
        for other, process in self.processes.items():
            if process.node == node:
                result[other] = process
        return result

    def kill(self, ranks: Collection[int]) -> None:
        """SIGKILL those of ranks that run on this node, after they could write their stacks."""
        known = {}
        for rank in ranks:
            if rank in self.processes:
                known[rank] = self.processes[rank]
        asked = []
        for process in known.values():
            asked.append(process.show_stacks() and process.wake())
        if any(asked):
            time.sleep(_STACK_SECONDS)
        for rank, process in known.items():
            if process.kill():
                logger.error("rank %d (process %d): sent SIGKILL", rank, process.pid)

    def local_survivors(self) -> list[int]:
        """Other ranks of this node whose process has not ended."""
        local = (rank for rank in self._others if self.processes[rank].is_local())
        result = []
        for rank in local:
            if not self.processes[rank].has_ended():
                result.append(rank)
        return result
