"""When a call is printed, when it ends the run, and who is named; clocks are numbers here."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from spmdflow.runtime.failure import Failure
from spmdflow.runtime.order import Order, Pending
from spmdflow.runtime.pace import Took
from spmdflow.runtime.peers import Ledger, Peers, Sent
from spmdflow.runtime.place import CODE, PEERS, ROWS
from spmdflow.runtime.process import Process
from spmdflow.runtime.rendezvous import SessionSettings
from spmdflow.runtime.stall import Stalls

HERE = "own.py:3 in step: pass"


class Session:
    """What `Stalls` needs of a session of two ranks, both of which are this process."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.failures: list[Failure] = []
        self.shown: list[list[int]] = []
        own = Process.of(os.getpid())
        self.peers, self.ledger = Peers({0: own, 1: own}, own_rank=0), Ledger()
        self.stalls = Stalls(
            self.peers,
            self.ledger,
            SessionSettings(tmp_path, (0, 1), **settings),
            fail=self.failures.append,
            show=self.shown.append,
        )
        self.start = self.now = time.monotonic()
        self._tickets = 0

    def send(self, label: str = "actor.update", operation: str = "call") -> Sent:
        self._tickets += 1
        commands: dict[int, Any] = dict.fromkeys((0, 1), {"operation": operation})
        order = Order(self._tickets, "compute", label, commands, 3600.0)
        sent = Sent(order, Pending(label, lambda pending: None))
        self.ledger.send(self._tickets, sent, now=self.now)
        return sent

    def answer(self, sent: Sent, *ranks: int, seconds: float = 0.1) -> None:
        for rank in ranks:
            took = Took(seconds)
            if self.ledger.answer(rank, sent.ticket, {}, now=self.now, took=took):
                self.stalls.finished(sent, self.now)

    def measure(self, seconds: float, **named: str) -> None:
        for _ in range(3):
            self.answer(self.send(**named), 0, 1, seconds=seconds)

    def run(self, seconds: float, kinds: dict[int, str], call: int) -> None:
        """So many seconds in which ranks send heartbeats."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank, kind in kinds.items():
                waited = self.now - self.start if kind == ROWS else 0.0
                self.peers.heard(rank, self.now)
                self.stalls.heard(rank, [[call, "compute", waited, kind, HERE, ""]], self.now)
            self.stalls.look(self.now)


def test_call_is_printed_after_a_minute_with_stacks_and_again_when_twice_as_long_has_passed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    sent = session.send()
    with caplog.at_level(logging.WARNING):
        session.run(59, {0: PEERS, 1: CODE}, sent.ticket)
        assert caplog.messages == []
        session.run(70, {0: PEERS, 1: CODE}, sent.ticket)

    first, second = caplog.messages
    assert first.startswith("actor.update (call 1, compute lane) runs for 60 s (no call before it)")
    assert f"it waits for rank 1: it is at {HERE}" in first
    assert "runs for 120 s" in second and session.shown == [[]]
    assert session.failures == []  # no median: nothing is known of its length


def test_call_of_many_medians_ends_the_run_and_names_the_rank_that_the_others_wait_for(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path)
    session.measure(0.1)
    sent = session.send()
    session.run(74, {0: PEERS, 1: CODE}, sent.ticket)
    assert session.failures == []
    session.run(2, {0: PEERS, 1: CODE}, sent.ticket)

    failure = session.failures[0]
    assert (failure.kind, failure.rank, failure.where) == ("deadline", 1, HERE)
    assert failure.cause.startswith("not finished within 75 s (10 medians of 0.1 s, at least 75 s)")


def test_rank_that_left_out_a_collective_is_named_though_it_has_finished(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.measure(0.1)
    sent = session.send()
    session.answer(sent, 1)
    session.run(80, {0: PEERS}, sent.ticket)

    assert session.failures[0].rank == 1
    assert "left out a collective" in session.failures[0].cause


@pytest.mark.parametrize(
    ("seconds", "kinds", "operation", "settings"),
    [
        pytest.param(20.0, {0: PEERS, 1: CODE}, "call", {}, id="ten medians are 200 s"),
        pytest.param(0.1, {0: PEERS, 1: ROWS}, "call", {}, id="a rank waits for rows"),
        pytest.param(0.1, {0: CODE, 1: CODE}, "save", {}, id="a disk may take its time"),
        pytest.param(0.1, {0: CODE, 1: CODE}, "call", {"call_seconds": 600.0}, id="a set limit"),
    ],
)
def test_call_goes_on(
    tmp_path: Path,
    seconds: float,
    kinds: dict[int, str],
    operation: str,
    settings: dict[str, float],
) -> None:
    session = Session(tmp_path, **settings)
    session.measure(seconds, operation=operation)
    sent = session.send(operation=operation)
    session.run(150, kinds, sent.ticket)

    assert session.failures == []


def test_time_in_which_the_controller_itself_was_stopped_does_not_count(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.measure(0.1)
    sent = session.send()
    session.run(10, {0: CODE, 1: CODE}, sent.ticket)
    session.now += 500.0
    session.run(60, {0: CODE, 1: CODE}, sent.ticket)

    assert session.failures == [] and session.peers.silence(1, session.now) == 0.0


def test_script_that_calls_nothing_for_a_minute_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    with caplog.at_level(logging.WARNING):
        session.run(65, {}, 0)

    assert len(caplog.messages) == 1 and "no call runs for 60 s" in caplog.messages[0]
