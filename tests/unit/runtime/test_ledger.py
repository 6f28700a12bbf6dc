"""The controller's books: who owes what since when."""

from __future__ import annotations

from typing import Any

import pytest

from spmdflow.runtime.call import Call, Ledger, Pending


def _send(
    ledger: Ledger, ticket: int, *ranks: int, lane: str = "compute", now: float = 0.0
) -> Pending:
    commands: dict[int, Any] = dict.fromkeys(ranks, {})
    sent = Pending(Call(ticket, lane, f"a.call{ticket}", commands, 10.0), lambda pending: None)
    ledger.record_sent(ticket, sent, now=now)
    return sent


def test_oldest_unanswered_command_of_each_lane_is_the_running_one() -> None:
    ledger = Ledger()
    for ticket in (1, 2):
        _send(ledger, ticket, 0)
    _send(ledger, 3, 0, lane="transfer")

    assert [order.number for order in ledger.running(0)] == [1, 3]
    ledger.answer(0, 1, {}, now=5.0)
    assert [order.number for order in ledger.running(0)] == [2, 3]
    assert ledger.running(1) == []


def test_answer_out_of_order_is_noticed() -> None:
    ledger = Ledger()
    for ticket in (1, 2):
        _send(ledger, ticket, 0)
    _send(ledger, 3, 1, lane="transfer")

    for rank, ticket in ((0, 2), (1, 1), (0, 3)):
        with pytest.raises(AssertionError):
            ledger.answer(rank, ticket, {}, now=1.0)


def test_order_is_complete_with_the_reply_of_its_last_rank() -> None:
    ledger = Ledger()
    sent = _send(ledger, 1, 0, 3)

    assert ledger.answer(3, 1, {"value": 3}, now=1.0) is None
    assert ledger.answer(0, 1, {"value": 0}, now=2.0) is sent
    assert sent.replies == {3: {"value": 3}, 0: {"value": 0}} and not ledger.open


def test_command_begins_with_the_answer_before_it_not_when_it_is_sent() -> None:
    ledger = Ledger()
    for ticket in (1, 2):
        _send(ledger, ticket, 0)

    assert (ledger.start_or_none(0, 1), ledger.start_or_none(0, 2)) == (0.0, None)
    ledger.answer(0, 1, {}, now=8.0)
    assert ledger.start_or_none(0, 2) == 8.0


def test_command_that_is_sent_to_an_idle_lane_begins_then() -> None:
    ledger = Ledger()
    _send(ledger, 1, 0)
    ledger.answer(0, 1, {}, now=1.0)
    _send(ledger, 2, 0, now=100.0)

    assert ledger.start_or_none(0, 2) == 100.0


def test_owing_names_ranks_with_open_commands() -> None:
    ledger = Ledger()
    _send(ledger, 1, 0)
    _send(ledger, 2, 3, lane="transfer")
    ledger.answer(0, 1, {}, now=1.0)

    assert ledger.owing() == {3}


def test_what_a_rank_did_last_is_known_when_nothing_runs() -> None:
    ledger = Ledger()
    _send(ledger, 7, 0, 1)

    assert ledger.last(0) == ""
    ledger.answer(0, 7, {}, now=1.0)
    assert (ledger.last(0), ledger.last(1)) == ("after a.call7 (call 7)", "")
