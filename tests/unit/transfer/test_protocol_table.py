"""The eight built-in protocols: who is given what, who holds it, who answers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.errors import RowError
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.protocol import BUILT_IN, Answer, even_chunks, protocol
from tests.unit.block_reference import layouts

LAYOUT = Layout(tuple(range(10, 18)), pp_size=2, dp_size=2, tp_size=2, gen_tp_size=1)
"""dp0: 10-13, dp1: 14-17; stages 10 11 | 12 13; d_g = 2 (micro_dp = tp)."""

ROWS = list(range(9))
FIRST = ROWS[:5]
SECOND = ROWS[5:]


@given(num_rows=st.integers(0, 200), parts=st.integers(1, 9))
def test_even_chunks_are_those_of_numpy(num_rows: int, parts: int) -> None:
    expected = [part.tolist() for part in np.array_split(np.arange(num_rows), parts)]

    assert even_chunks(num_rows, parts) == expected


@pytest.mark.parametrize(("num_rows", "parts"), [(-1, 2), (5, 0)])
def test_cut_that_cannot_be_made_is_refused_with_both_numbers(num_rows: int, parts: int) -> None:
    with pytest.raises(RowError, match=f"got {num_rows} rows over {parts} parts"):
        even_chunks(num_rows, parts)


def test_names_are_those_of_the_design_in_its_order():
    assert [rules.name for rules in BUILT_IN] == [
        "ONE_TO_ALL",
        "3D_PROTO",
        "3D_ALL_MICRO_DP",
        "3D_PP_ONLY",
        "DP_PROTO",
        "ALL_TO_ALL",
        "3D_PP_AS_DP",
        "DP_METRIC",
    ]


@pytest.mark.parametrize("name", ["ONE_TO_ALL", "3D_PP_ONLY"])
def test_everything_goes_to_every_rank_in(name):
    assert protocol(name).distribute(LAYOUT, 9) == dict.fromkeys(LAYOUT.ranks, ROWS)


def test_one_to_all_is_answered_by_all_as_a_list():
    assert protocol("ONE_TO_ALL").collect(LAYOUT) == Answer(LAYOUT.ranks, joined=False)


def test_3d_proto_gives_chunk_dp_and_last_stages_first_tp_answers_while_its_peers_hold_too():
    rules = protocol("3D_PROTO")

    assert rules.distribute(LAYOUT, 9) == dict.fromkeys(range(10, 14), FIRST) | dict.fromkeys(
        range(14, 18), SECOND
    )
    assert rules.collect(LAYOUT) == Answer((12, 16), joined=True)
    assert rules.holds(LAYOUT, 9) == {12: FIRST, 13: FIRST, 16: SECOND, 17: SECOND}


def test_3d_all_micro_dp_gives_each_generation_replica_a_chunk_that_all_its_ranks_hold():
    rules = protocol("3D_ALL_MICRO_DP")
    chunks = [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    given = {rank: chunks[(rank - 10) // 4 * 2 + rank % 2] for rank in LAYOUT.ranks}

    assert rules.distribute(LAYOUT, 9) == given
    assert rules.holds(LAYOUT, 9) == given
    assert rules.collect(LAYOUT) == Answer((10, 11, 14, 15), joined=True)


def test_3d_pp_only_is_answered_by_the_stages_of_the_first_replica_as_a_list():
    rules = protocol("3D_PP_ONLY")

    assert rules.collect(LAYOUT) == Answer((10, 12), joined=False)
    assert rules.holds(LAYOUT, 9) == {10: ROWS, 12: ROWS}


@pytest.mark.parametrize(("name", "joined"), [("DP_PROTO", True), ("DP_METRIC", False)])
def test_chunk_of_its_rank_goes_to_every_rank_in(name, joined):
    rules = protocol(name)
    sizes = [len(rows) for rows in rules.distribute(LAYOUT, 9).values()]

    assert sizes == [2, 1, 1, 1, 1, 1, 1, 1]
    assert list(chain(*rules.distribute(LAYOUT, 9).values())) == ROWS
    assert rules.holds(LAYOUT, 9) == rules.distribute(LAYOUT, 9)
    assert rules.collect(LAYOUT) == Answer(LAYOUT.ranks, joined)


def test_all_to_all_gives_the_ith_of_a_list_to_the_ith_rank():
    rules = protocol("ALL_TO_ALL")

    assert rules.distribute(LAYOUT, 8) == {10 + i: [i] for i in range(8)}
    assert rules.collect(LAYOUT) == Answer(LAYOUT.ranks, joined=False)


@pytest.mark.parametrize("num_rows", [0, 7, 9])
def test_all_to_all_list_of_another_length_is_refused_with_both_numbers(num_rows):
    with pytest.raises(RowError, match=f"got a list of {num_rows}, expected 8"):
        protocol("ALL_TO_ALL").distribute(LAYOUT, num_rows)


def test_3d_pp_as_dp_cuts_by_dp_and_stage_and_tp_0_answers():
    rules = protocol("3D_PP_AS_DP")
    held = {10: [0, 1, 2], 12: [3, 4], 14: [5, 6], 16: [7, 8]}

    assert rules.distribute(LAYOUT, 9) == held | {rank + 1: rows for rank, rows in held.items()}
    assert rules.collect(LAYOUT) == Answer((10, 12, 14, 16), joined=True)
    assert rules.holds(LAYOUT, 9) == held


GIVEN_BY_THE_TABLE: dict[str, Callable[[Layout, int], tuple[int, int]]] = {
    "ONE_TO_ALL": lambda layout, rank: (0, 1),
    "3D_PROTO": lambda layout, rank: (layout.coordinate(rank).dp, layout.dp_size),
    "3D_ALL_MICRO_DP": lambda layout, rank: (
        layout.coordinate(rank).dp * layout.num_generation_replicas + layout.micro_dp(rank),
        layout.dp_size * layout.num_generation_replicas,
    ),
    "3D_PP_ONLY": lambda layout, rank: (0, 1),
    "DP_PROTO": lambda layout, rank: (layout.group_rank(rank), layout.size),
    "ALL_TO_ALL": lambda layout, rank: (layout.group_rank(rank), layout.size),
    "3D_PP_AS_DP": lambda layout, rank: (
        layout.coordinate(rank).dp * layout.pp_size + layout.coordinate(rank).pp,
        layout.dp_size * layout.pp_size,
    ),
    "DP_METRIC": lambda layout, rank: (layout.group_rank(rank), layout.size),
}


@pytest.mark.parametrize("name", list(GIVEN_BY_THE_TABLE))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
def test_every_layout_gives_each_rank_the_chunk_of_the_table(name, size):
    for layout in layouts(size, first=1):
        for num_rows in {size} if name == "ALL_TO_ALL" else {0, 1, 5, 9, 30}:
            given = protocol(name).distribute(layout, num_rows)
            assert list(given) == list(layout.ranks)
            for rank in layout.ranks:
                chunk, parts = GIVEN_BY_THE_TABLE[name](layout, rank)
                assert given[rank] == np.array_split(np.arange(num_rows), parts)[chunk].tolist()
                assert protocol(name).num_shares(layout) == parts


@pytest.mark.parametrize("name", list(GIVEN_BY_THE_TABLE))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
def test_joined_answers_are_the_rows_in_order_each_once_in_every_layout(name, size):
    for layout in layouts(size, first=1):
        num_rows = size if name == "ALL_TO_ALL" else 9
        rules = protocol(name)
        answer = rules.collect(layout)
        held = rules.holds(layout, num_rows)
        assert set(answer.ranks) <= set(held)
        if answer.joined:
            assert list(chain(*(held[rank] for rank in answer.ranks))) == list(range(num_rows))


@pytest.mark.parametrize("name", [name for name in GIVEN_BY_THE_TABLE if name != "ALL_TO_ALL"])
def test_shares_of_the_caller_replace_the_even_chunks(name):
    rules = protocol(name)
    parts = rules.num_shares(LAYOUT)
    shares = [list(range(part, 20, parts)) for part in range(parts)]

    given = rules.distribute(LAYOUT, 20, shares)
    even = rules.distribute(LAYOUT, 20)

    for rank in LAYOUT.ranks:
        chunks = np.array_split(np.arange(20), parts)
        chunk = [c.tolist() for c in chunks].index(even[rank])
        assert given[rank] == shares[chunk]
    assert all(given[rank] == rows for rank, rows in rules.holds(LAYOUT, 20, shares).items())
