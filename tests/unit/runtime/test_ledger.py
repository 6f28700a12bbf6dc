"""The controller's books: who owes what since when."""

from __future__ import annotations

from spmdflow.runtime.peers import GRACE_SECONDS, Entry, Ledger


def _sent(
    ledger: Ledger, rank: int, ticket: int, lane: str = "compute", since: float = 0.0
) -> None:
    ledger.sent(rank, Entry(ticket, ticket, lane, f"a.call{ticket}", 10.0, since))


def test_oldest_unanswered_command_of_each_lane_is_the_running_one() -> None:
    ledger = Ledger()
    for ticket in (1, 2):
        _sent(ledger, 0, ticket)
    _sent(ledger, 0, 3, "transfer")

    assert [entry.ticket for entry in ledger.running(0)] == [1, 3]
    assert ledger.answered(0, "compute", 1, now=5.0)
    assert [entry.ticket for entry in ledger.running(0)] == [2, 3]
    assert ledger.running(1) == []


def test_answer_out_of_order_is_noticed() -> None:
    ledger = Ledger()
    for ticket in (1, 2):
        _sent(ledger, 0, ticket)

    assert not ledger.answered(0, "compute", 2, now=1.0)
    assert not ledger.answered(0, "transfer", 1, now=1.0)
    assert not ledger.answered(1, "compute", 1, now=1.0)


def test_limit_counts_from_the_answer_before_not_from_sending() -> None:
    ledger = Ledger()
    _sent(ledger, 0, 1)
    _sent(ledger, 0, 2)
    limit = 10.0 + GRACE_SECONDS

    assert [rank for rank, _ in ledger.overdue(limit)] == []
    assert [(rank, entry.ticket) for rank, entry in ledger.overdue(limit + 0.1)] == [(0, 1)]
    ledger.answered(0, "compute", 1, now=8.0)
    assert list(ledger.overdue(8.0 + limit)) == []
    assert [entry.ticket for _, entry in ledger.overdue(8.1 + limit)] == [2]


def test_limit_of_a_command_sent_to_an_idle_lane_counts_from_sending() -> None:
    ledger = Ledger()
    _sent(ledger, 0, 1)
    ledger.answered(0, "compute", 1, now=1.0)
    _sent(ledger, 0, 2, since=100.0)

    assert list(ledger.overdue(100.0 + 10.0 + GRACE_SECONDS)) == []


def test_owing_names_ranks_with_open_commands() -> None:
    ledger = Ledger()
    _sent(ledger, 0, 1)
    _sent(ledger, 3, 1, "transfer")
    ledger.answered(0, "compute", 1, now=1.0)

    assert ledger.owing() == {3}
