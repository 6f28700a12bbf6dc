"""When a call is printed, when it ends the run, and who is named; clocks are numbers here."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdflow.failure.lane_state import CODE, PEERS
from spmdflow.failure.process import Process
from tests.unit.failure.stalled import HERE, Session


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
    assert first.startswith(
        "actor.update (call 1, compute lane) has been running for 60 s (no call before it)"
    )
    assert f"the call waits for rank 1: it is at {HERE}" in first
    assert "has been running for 120 s" in second and session.shown == [[]]
    assert session.failures == []  # no median: nothing is known of its length


def test_call_of_many_medians_ends_the_run_and_names_the_rank_that_the_others_wait_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    session.measure(0.1)
    sent = session.send()
    with caplog.at_level(logging.WARNING):
        session.run(599, {0: PEERS, 1: CODE}, sent.ticket)
    assert session.failures == []
    limit = "600 s (20 medians of 0.1 s, at least 600 s)"
    assert f"; the run ends if it takes {limit}; stacks: " in caplog.messages[0]
    session.run(2, {0: PEERS, 1: CODE}, sent.ticket)

    failure = session.failures[0]
    assert (failure.kind, failure.rank, failure.where) == ("deadline", 1, HERE)
    assert failure.cause.startswith("not finished within 600 s (20 medians of 0.1 s, at least 600")


def test_usually_fast_call_that_stalls_once_is_told_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    session.measure(0.1)
    sent = session.send()
    with caplog.at_level(logging.WARNING):
        session.run(75, {0: PEERS, 1: CODE}, sent.ticket)
    session.answer(sent, 0, 1, seconds=75.0)

    assert session.failures == [] and session.shown == [[]]
    assert f"the call waits for rank 1: it is at {HERE}" in caplog.messages[0]


def test_rank_that_is_stopped_ends_the_run_after_75_s(tmp_path: Path) -> None:
    session = Session(tmp_path)
    sent = session.send()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        session.peers.processes[1] = Process.of(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        while not session.peers.processes[1].is_stopped():
            time.sleep(0.001)
        session.run(74, {0: PEERS}, sent.ticket)
        assert session.failures == []
        session.run(2, {0: PEERS}, sent.ticket)
        child.kill()

    assert (session.failures[0].kind, session.failures[0].rank) == ("stopped", 1)


def test_line_of_a_rank_that_is_gone_is_that_of_its_last_heartbeat_in_the_call(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path)
    sent = session.send()
    session.run(3, {1: CODE}, sent.ticket)

    assert session.stalls.last_line(1, sent.call, session.now + 4.0) == f"{HERE} (4 s before)"
    assert session.stalls.last_line(0, sent.call, session.now) == ""


def test_rank_that_left_out_a_collective_is_named_though_it_has_finished(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.measure(0.1)
    sent = session.send()
    session.answer(sent, 1)
    session.run(610, {0: PEERS}, sent.ticket)

    assert (session.failures[0].rank, session.failures[0].where) == (1, HERE)
    assert "skipped a collective" in session.failures[0].cause


@pytest.mark.parametrize(
    ("seconds", "kinds", "operation", "settings"),
    [
        pytest.param(40.0, {0: PEERS, 1: CODE}, "call", {}, id="20 medians are 800 s"),
        pytest.param(0.1, {0: CODE, 1: CODE}, "save", {}, id="a disk may take its time"),
        pytest.param(0.1, {0: CODE, 1: CODE}, "call", {"call_seconds": 1800.0}, id="a set limit"),
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
    session.run(750, kinds, sent.ticket)

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

    assert len(caplog.messages) == 1 and "no call has run for 60 s" in caplog.messages[0]


def test_transfers_of_one_methods_rows_are_one_kind_of_call_however_many_there_are(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path)
    for number in range(1, 101):
        sent = session.send(
            f"transfer {number} of actor.generate", kind="transfer of actor.generate"
        )
        session.answer(sent, 0, 1)

    assert list(session.stalls.status(session.now)["medians"]) == [
        "transfer of actor.generate (train)"
    ]


@pytest.mark.parametrize("other_kind", [CODE, PEERS])
def test_ranks_that_wait_for_one_another_are_blamed_unless_another_call_computes(
    tmp_path: Path, other_kind: str
) -> None:
    session = Session(tmp_path)
    session.measure(0.1)
    waiting = session.send()
    other = session.send("map.bonus", lane="transfer")  # never measured: it has no limit itself
    for _ in range(610):
        session.now += 1.0
        for rank in (0, 1):
            session.peers.note_message(rank, session.now)
            heartbeat = [
                [waiting.ticket, "compute", 0.0, PEERS, HERE, ""],
                [other.ticket, "transfer", 0.0, other_kind, HERE, ""],
            ]
            session.stalls.note_heartbeat(rank, heartbeat, session.now)
        session.stalls.check(session.now)

    blamed = {failure.number for failure in session.failures}
    assert blamed == (set() if other_kind == CODE else {waiting.ticket})
