"""One limit for a call, and one clock: waiting for rows does not count. Clocks are numbers here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from spmdflow.failure.lane_state import CODE, PEERS, ROWS
from spmdflow.failure.limit import FIRST_SECONDS, Heartbeat, computing_seconds
from tests.unit.failure.stalled import Session


def test_call_that_waits_for_rows_of_two_calls_of_six_seconds_passes_a_limit_of_nine(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path, call_seconds=9.0)
    one = session.send("slow.one", ranks=(0,))
    two = session.send("slow.two", ranks=(0,))
    judge = session.send("judge.judge", ranks=(1,))

    session.run_calls(6, {0: (one.ticket, CODE), 1: (judge.ticket, ROWS)})
    session.answer(one, 0, seconds=6.0)
    session.run_calls(6, {0: (two.ticket, CODE), 1: (judge.ticket, ROWS)})
    session.answer(two, 0, seconds=6.0)
    session.run_calls(8, {1: (judge.ticket, CODE)})
    session.answer(judge, 1, seconds=8.0)

    assert session.failures == []


def test_call_that_waited_for_rows_and_then_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    session = Session(tmp_path, call_seconds=9.0)
    one = session.send("slow.one", ranks=(0,))
    judge = session.send("judge.judge", ranks=(1,))
    session.run_calls(8, {0: (one.ticket, CODE), 1: (judge.ticket, ROWS)})
    session.answer(one, 0, seconds=8.0)

    session.run_calls(8, {1: (judge.ticket, CODE)})
    assert session.failures == []
    session.run_calls(2, {1: (judge.ticket, CODE)})

    failure = session.failures[0]
    assert (failure.kind, failure.rank, failure.label) == ("deadline", 1, "judge.judge")
    assert failure.cause.startswith("not finished within 9 s (the limit that is set): it is at own")


def test_rank_in_a_collective_is_not_late_while_the_other_rank_runs_the_calls_before(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path, call_seconds=9.0)
    before = [session.send(f"slow.number{number}", ranks=(1,)) for number in range(3)]
    both = session.send()

    for each in before:
        session.run_calls(8, {0: (both.ticket, PEERS), 1: (each.ticket, CODE)})
        session.answer(each, 1, seconds=8.0)
    session.run_calls(8, {0: (both.ticket, PEERS), 1: (both.ticket, CODE)})

    assert session.failures == []


@pytest.mark.parametrize("hung", [0, 1])
def test_hung_rank_is_named_also_if_it_is_the_controllers_own(tmp_path: Path, hung: int) -> None:
    session = Session(tmp_path, call_seconds=9.0)
    sent = session.send()

    session.run(11, {hung: CODE, 1 - hung: PEERS}, sent.ticket)

    assert [(failure.kind, failure.rank) for failure in session.failures[:1]] == [
        ("deadline", hung)
    ]


def test_call_whose_median_is_fifty_minutes_runs_on_after_an_hour_with_auto(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path)
    session.measure(3000.0)
    sent = session.send()

    session.run(2 * FIRST_SECONDS, {0: CODE, 1: CODE}, sent.ticket)

    assert session.failures == []


def test_limit_that_is_printed_before_there_are_medians_is_the_one_that_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    sent = session.send()
    with caplog.at_level(logging.WARNING):
        session.run(FIRST_SECONDS - 1, {0: CODE, 1: CODE}, sent.ticket)
    assert "the run ends if it takes 3600 s (the limit before it was made 3 times" in caplog.text
    assert session.failures == []

    session.run(2, {0: CODE, 1: CODE}, sent.ticket)

    assert session.failures[0].cause.startswith("not finished within 3600 s (the limit before")


def test_rows_that_nothing_brings_end_the_run(tmp_path: Path) -> None:
    session = Session(tmp_path)
    sent = session.send(ranks=(1,))

    session.run_calls(599, {1: (sent.ticket, ROWS)})
    assert session.failures == []
    session.run_calls(60, {1: (sent.ticket, ROWS)})

    failure = session.failures[0]
    assert (failure.kind, failure.rank) == ("deadline", 1)
    assert failure.cause.startswith("waits for rows, and nothing has run for 6")


def test_rows_of_a_call_that_runs_are_waited_for_as_long_as_its_own_limit(tmp_path: Path) -> None:
    session = Session(tmp_path)
    maker = session.send("slow.make", ranks=(0,))
    judge = session.send("judge.judge", ranks=(1,))

    session.run_calls(3000, {0: (maker.ticket, CODE), 1: (judge.ticket, ROWS)})

    assert session.failures == []


def test_calls_sent_after_the_limit_do_not_excuse_a_call_whose_ranks_are_all_in_collectives(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path, call_seconds=9.0)
    stuck = session.send("actor.update", ranks=(1,))
    before = session.send("slow.before", ranks=(0,))
    session.run_calls(8, {0: (before.ticket, CODE), 1: (stuck.ticket, PEERS)})
    session.answer(before, 0, seconds=8.0)
    session.now += 0.5
    session.run_calls(2, {1: (stuck.ticket, PEERS)})
    after = session.send("slow.after", ranks=(0,))
    session.run_calls(2, {0: (after.ticket, CODE), 1: (stuck.ticket, PEERS)})

    assert session.failures[0].label == "actor.update"


def test_only_time_that_a_heartbeat_has_told_of_counts_unless_the_rank_is_silent() -> None:
    heard = Heartbeat(at=20.0, row_seconds=4.0)

    assert computing_seconds(10.0, heard, 25.0, is_silent=False) == 6.0
    assert computing_seconds(10.0, heard, 25.0, is_silent=True) == 11.0
    assert computing_seconds(10.0, None, 25.0, is_silent=False) == 0.0
    assert computing_seconds(10.0, None, 25.0, is_silent=True) == 15.0
