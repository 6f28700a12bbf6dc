"""Protocols of a user, and everything a protocol refuses."""

from __future__ import annotations

import pytest

from spmdflow.errors import ProtocolError, RowError
from spmdflow.parallel.layout import Layout
from spmdflow.transfer import protocol as registry
from spmdflow.transfer.protocol import Answer, Protocol, protocol, register_protocol

FOUR = Layout.data_parallel((0, 1, 2, 3))
ALL_JOINED = Answer((0, 1, 2, 3), joined=True)


def interleaved(layout, num_rows, shares):
    return {rank: range(layout.group_rank(rank), num_rows, layout.size) for rank in layout.ranks}


def custom(name="INTERLEAVED", **changes):
    functions = {
        "distribute": interleaved,
        "collect": lambda layout: Answer(layout.ranks, joined=True),
        "num_shares": lambda layout: layout.size,
    }
    return Protocol(name, **functions | changes)


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def test_registered_protocol_is_found_by_name_and_its_answerers_hold_what_they_were_given(
    own_registry,
):
    register_protocol(custom())

    rules = protocol("INTERLEAVED")

    assert rules.distribute(FOUR, 6) == {0: [0, 4], 1: [1, 5], 2: [2], 3: [3]}
    assert rules.holds(FOUR, 6) == rules.distribute(FOUR, 6)
    assert rules.collect(FOUR) == ALL_JOINED


def test_holds_of_a_user_may_differ_from_what_was_given():
    rules = custom(
        collect=lambda layout: Answer(layout.ranks[:1], joined=True),
        holds=lambda layout, num_rows, shares: {layout.ranks[0]: list(range(num_rows))},
    )

    assert rules.holds(FOUR, 3) == {0: [0, 1, 2]}


def test_module_may_register_its_own_protocol_again(own_registry):
    register_protocol(custom())
    newer = custom()

    assert register_protocol(newer) is protocol("INTERLEAVED") is newer


def test_name_of_a_built_in_protocol_is_refused(own_registry):
    with pytest.raises(ProtocolError, match="a name that spmdflow.transfer.protocol does not use"):
        register_protocol(custom("DP_PROTO"))


def test_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ProtocolError, match="got '3D_PROT', expected .* did you mean '3D_PROTO'"):
        protocol("3D_PROT")


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([[0], [1]], "got 2 shares, expected 4"),
        ([[0], [1], [2], []], r"without row 3, expected all of 4 rows; 1 rows are in no share"),
        ([[0, 0], [1], [2], [3]], r"share 0 got 2 positions \(1 distinct\) from 0 to 0"),
        ([[0, 1, 2, 3], [4], [], []], "share 1 got 1 positions .* from 0 to 3"),
        ([[0, 1, 2, 3], [-1], [], []], "share 1 got .* from -1 to -1"),
    ],
)
def test_shares_that_do_not_fit_are_refused_with_both_numbers(shares, message):
    with pytest.raises(RowError, match=message):
        protocol("DP_PROTO").distribute(FOUR, 4, shares)


def test_shares_may_overlap_because_a_row_visits_several_ranks_over_epochs():
    shares = [[0, 1], [1, 2], [0, 2], []]

    assert protocol("DP_METRIC").distribute(FOUR, 3, shares)[1] == [1, 2]
    assert protocol("DP_PROTO").holds(FOUR, 3, shares)[2] == [0, 2]


def test_negative_number_of_rows_is_refused():
    with pytest.raises(RowError, match="got -1 rows over 4 parts"):
        protocol("DP_PROTO").distribute(FOUR, -1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distribute": lambda layout, n, shares: {7: [0]}}, "distribute got rank 7"),
        ({"distribute": lambda layout, n, shares: {0: [n]}}, "distribute got 1 positions"),
        ({"distribute": lambda layout, n, shares: {0: [0, 0]}}, r"\(1 distinct\)"),
        ({"holds": lambda layout, n, shares: {9: []}}, "holds got rank 9"),
        (
            {"holds": lambda layout, n, shares: {0: [0, 1]}},
            "got 2 rows from the answering ranks .* expected 3, .* no answering rank has row 2",
        ),
        (
            {"holds": lambda layout, n, shares: dict.fromkeys((0, 1), [0, 1, 2])},
            "got 6 rows .* expected 3, .* some rows come twice",
        ),
        ({"collect": lambda layout: Answer((5,), joined=True)}, r"collect got ranks \(5,\)"),
        ({"collect": lambda layout: Answer((0, 0), joined=True)}, "each once; correct collect"),
        ({"collect": lambda layout: Answer((), joined=True)}, r"collect got ranks \(\)"),
    ],
)
def test_wrong_function_of_a_user_is_refused_when_it_is_used(changes, message):
    with pytest.raises(ProtocolError, match=message):
        rules = custom(**changes)
        rules.distribute(FOUR, 3)
        rules.holds(FOUR, 3)
