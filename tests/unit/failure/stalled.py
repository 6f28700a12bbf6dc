"""A session of two ranks on paper: real books, clocks that are numbers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from spmdflow.failure.cause import Failure
from spmdflow.failure.duration import CallDuration
from spmdflow.failure.lane_state import ROWS
from spmdflow.failure.peers import Peers
from spmdflow.failure.process import Process
from spmdflow.failure.settings import SessionSettings
from spmdflow.failure.stall import StallWatch
from spmdflow.runtime.call import Call, Ledger, Pending

HERE = "own.py:3 in step: pass"


class Session:
    """What `StallWatch` needs of a session of two ranks, both of which are this process."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.failures: list[Failure] = []
        self.shown: list[list[int]] = []
        self.start = self.now = float(int(time.monotonic()))  # whole: sums are exact
        own = Process.of(os.getpid())
        self.peers = Peers({0: own, 1: own}, own_rank=0)
        self.ledger = Ledger()
        for rank in (0, 1):
            self.peers.note_message(rank, self.now)  # not by the clock, which has gone on
        self.stalls = StallWatch(
            self.peers,
            self.ledger,
            SessionSettings(tmp_path, (0, 1), **settings),
            fail=self.failures.append,
            show_stacks=self.shown.append,
            now=self.now,
        )
        self._tickets = 0
        self._limit: float | None = settings.get("call_seconds")
        self._row_seconds: dict[tuple[int, int], float] = {}
        """How long a rank has waited for rows in a call, by rank and call."""

    def send(
        self,
        label: str = "actor.update",
        operation: str = "call",
        kind: str = "",
        ranks: tuple[int, ...] = (0, 1),
        lane: str = "compute",
    ) -> Pending:
        self._tickets += 1
        commands: dict[int, Any] = dict.fromkeys(ranks, {"operation": operation})
        call = Call(self._tickets, lane, label, commands, self._limit, kind=kind)
        pending = Pending(call, lambda pending: None)
        self.ledger.record_sent(self._tickets, pending, now=self.now)
        return pending

    def answer(self, pending: Pending, *ranks: int, seconds: float = 0.1) -> None:
        for rank in ranks:
            duration = CallDuration(seconds)
            if self.ledger.answer(rank, pending.ticket, {}, now=self.now, duration=duration):
                self.stalls.end_call(pending, self.now)

    def measure(self, seconds: float, **named: str) -> None:
        for _ in range(3):
            self.answer(self.send(**named), 0, 1, seconds=seconds)

    def run(self, seconds: float, kinds: dict[int, str], call: int) -> None:
        """So many seconds in which ranks send heartbeats about one call."""
        self.run_calls(seconds, {rank: (call, kind) for rank, kind in kinds.items()})

    def run_calls(self, seconds: float, doing: dict[int, tuple[int, str]]) -> None:
        """So many seconds of heartbeats; doing: call and kind of place, by rank."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank, (call, kind) in doing.items():
                waited = self._row_seconds.get((rank, call), 0.0) + (kind == ROWS)
                self._row_seconds[rank, call] = waited
                self.peers.note_message(rank, self.now)
                self.stalls.note_heartbeat(
                    rank, [[call, "compute", waited, kind, HERE, ""]], self.now
                )
            self.stalls.check(self.now)
