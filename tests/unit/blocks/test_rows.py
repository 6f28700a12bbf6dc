"""Row plans against the element-by-element reference, and what they promise."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.blocks.plan import level_loads
from spmdflow.blocks.rows import plan_rounds, redistribute_rows
from spmdflow.errors import RowError
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.protocol import protocol
from tests.unit.block_proof import verify_rows
from tests.unit.block_reference import arrays, moves_of, reference_moves, sets


def plain(edges):
    return [(edge.source, edge.destination, edge.ids.tolist()) for edge in edges]


def node_of_4(rank):
    return rank // 4


@st.composite
def problems(draw, max_rank=63, num_ids=40):
    """Random ids, random holders (each id has one at least), random needs, random order."""
    ids = draw(
        st.lists(st.integers(0, 2**62), min_size=1, max_size=num_ids, unique=True), label="ids"
    )
    ranks = draw(st.lists(st.integers(0, max_rank), min_size=1, max_size=8, unique=True))
    have = {rank: [] for rank in ranks}
    for item in ids:
        for rank in draw(st.sets(st.sampled_from(ranks), min_size=1, max_size=3)):
            have[rank].append(item)
    others = draw(st.lists(st.integers(0, max_rank), max_size=8, unique=True))
    need = {rank: draw(st.lists(st.sampled_from(ids), unique=True)) for rank in others}
    return arrays(have), arrays(need)


def test_design_example_sends_every_destination_its_rows_from_one_peer_each():
    actor = Layout((0, 1, 2, 3), tp_size=2, dp_size=2)
    critic = Layout.data_parallel((4, 5, 6, 7))
    have = arrays(protocol("3D_PROTO").holds(actor, 64))
    need = arrays(protocol("DP_PROTO").distribute(critic, 64))

    edges = redistribute_rows(have, need)

    assert plain(edges) == [(r, 4 + r, list(range(16 * r, 16 * r + 16))) for r in range(4)]


def test_peers_with_the_same_rows_send_half_each_to_one_destination():
    have = arrays({0: range(6), 1: range(6)})

    edges = redistribute_rows(have, arrays({2: [5, 3, 1, 0, 2, 4]}))

    assert plain(edges) == [(0, 2, [0, 1, 2]), (1, 2, [3, 4, 5])]


def test_rank_that_sends_already_is_spared():
    have = arrays({0: [1, 2, 3, 4], 1: [1, 2], 2: [3, 4]})
    have[0] = np.concatenate([have[0], [7, 8]])

    edges = redistribute_rows(have, arrays({5: [1, 2, 7, 8], 6: [3, 4]}))

    assert plain(edges) == [(0, 5, [7, 8]), (1, 5, [1, 2]), (2, 6, [3, 4])]


def test_holder_on_the_same_node_sends_even_if_others_are_idle():
    have = arrays({0: range(4), 4: range(4), 8: range(4)})
    need = arrays({5: range(4), 6: range(4), 12: [0, 1]})

    edges = redistribute_rows(have, need, node_of=node_of_4)

    assert {(e.source, e.destination) for e in edges} == {(4, 5), (4, 6), (0, 12), (8, 12)}


def test_rows_that_are_there_are_not_sent():
    have = arrays({0: [0, 1, 2, 3], 1: [2, 3]})

    assert redistribute_rows(have, have) == []
    assert plain(redistribute_rows(have, arrays({1: [3, 1]}))) == [(0, 1, [1])]


def test_nothing_needed_makes_no_edges():
    assert redistribute_rows({}, {}) == []
    assert redistribute_rows({}, arrays({0: []})) == []
    assert redistribute_rows(arrays({0: [1]}), arrays({1: []})) == []


def test_row_that_nobody_holds_is_refused_with_rank_and_id():
    with pytest.raises(RowError, match=r"rank 1: got 2 of 3 needed rows .* \(first id 8\)"):
        redistribute_rows(arrays({0: [7]}), arrays({1: [7, 8, 9]}))


@pytest.mark.parametrize("side", ["have", "need"])
def test_row_named_twice_is_refused_with_rank_and_id(side):
    good = arrays({0: [7, 8]})
    twice = arrays({3: [8, 7, 8]})

    with pytest.raises(RowError, match="rows of rank 3: got id 8 more than once among 3"):
        redistribute_rows(*((twice, good) if side == "have" else (good, twice)))


@settings(max_examples=300, deadline=None)
@given(problem=problems(), nodes=st.sampled_from([None, node_of_4]))
def test_random_plan_is_right_and_equals_the_reference(problem, nodes):
    have, need = problem

    edges = redistribute_rows(have, need, node_of=nodes)

    verify_rows(edges, have, need, node_of=nodes)
    as_sets = ({r: frozenset(v.tolist()) for r, v in side.items()} for side in problem)
    assert moves_of(edges) == reference_moves(*as_sets, node_of=nodes)


@settings(max_examples=100, deadline=None)
@given(problem=problems(), seed=st.integers(0, 999))
def test_plan_does_not_depend_on_the_order_of_ranks_or_ids(problem, seed):
    have, need = problem
    shuffle = np.random.default_rng(seed)

    def shuffled(side):
        return {rank: shuffle.permutation(side[rank]) for rank in shuffle.permutation(list(side))}

    assert plain(redistribute_rows(shuffled(have), shuffled(need))) == plain(
        redistribute_rows(have, need)
    )


@settings(max_examples=100, deadline=None)
@given(
    num_holders=st.integers(1, 20),
    num_destinations=st.integers(1, 20),
    num_rows=st.integers(0, 60),
)
def test_equal_holders_send_within_one_row_of_each_other_over_few_edges(
    num_holders, num_destinations, num_rows
):
    have = {rank: np.arange(num_rows) for rank in range(num_holders)}
    need = {100 + rank: np.arange(num_rows) for rank in range(num_destinations)}

    edges = redistribute_rows(have, need)

    sent = [sum(len(e.ids) for e in edges if e.source == rank) for rank in have]
    assert max(sent) - min(sent) <= 1
    assert len(edges) <= num_holders + num_destinations - 1


@given(loads=st.lists(st.integers(0, 30), min_size=1, max_size=12), total=st.integers(0, 99))
def test_loads_are_levelled_like_water(loads, total):
    parts = level_loads(loads, total)

    after = [load + part for load, part in zip(loads, parts, strict=True)]
    assert sum(parts) == total and min(parts) >= 0
    receiving = [level for level, part in zip(after, parts, strict=True) if part]
    assert all(level <= min(after) + 1 for level in receiving)


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [("3D_PROTO", "DP_PROTO"), ("DP_PROTO", "3D_PROTO"), ("3D_ALL_MICRO_DP", "3D_PP_AS_DP")],
)
def test_plan_for_1024_ranks_and_100_000_rows_takes_about_a_second(producer, consumer):
    grid = Layout(tuple(range(512)), pp_size=4, dp_size=16, tp_size=8, gen_tp_size=2)
    flat = Layout.data_parallel(tuple(range(512, 1024)))
    sides = (grid, flat) if producer.startswith("3D") else (flat, grid)
    have = arrays(protocol(producer).holds(sides[0], 100_000))
    need = arrays(protocol(consumer).distribute(sides[1], 100_000))

    start = time.process_time()
    edges = redistribute_rows(have, need, node_of=lambda rank: rank // 8)
    seconds = time.process_time() - start

    assert sum(len(edge.ids) for edge in edges) == sum(len(ids) for ids in need.values())
    assert seconds < 3, "measured 0.1 s; the limit leaves room for a slow machine"
    assert sets(need).keys() == {edge.destination for edge in edges}


def test_plan_of_later_ids_is_the_plan_of_the_step_before_with_later_ids():
    have = {0: [3, 5, 4], 1: [4, 9]}
    need = {2: [9, 4], 3: [3, 4, 5]}
    first = plain(redistribute_rows(arrays(have), arrays(need), node_of=node_of_4))

    for later in (0, 17, 2**61):
        shifted = [
            {r: [i + later for i in ids] for r, ids in side.items()} for side in (have, need)
        ]
        edges = redistribute_rows(*map(arrays, shifted), node_of=node_of_4)
        assert plain(edges) == [(s, d, [i + later for i in ids]) for s, d, ids in first]
        for edge in edges:
            edge.ids[:] = -1  # what is remembered must not change with it
    assert plain(redistribute_rows(arrays(have), arrays(need), node_of=lambda rank: rank)) != []


def test_row_that_nobody_holds_is_named_by_its_true_id():
    with pytest.raises(RowError, match="first id 1007"):
        redistribute_rows(arrays({0: [1000, 1001]}), arrays({1: [1001, 1007]}))


def after(have, edges):
    """What each rank has once the edges have brought their rows."""
    arrived = {rank: [ids] for rank, ids in have.items()}
    for edge in edges:
        arrived.setdefault(edge.destination, []).append(edge.ids)
    return {rank: np.unique(np.concatenate(ids)) for rank, ids in arrived.items()}


def test_replica_gets_rows_once_and_its_ranks_exchange_them():
    have = arrays({0: range(4)})
    need = arrays({1: range(4), 2: range(4)})

    first, second = plan_rounds(have, need)

    assert plain(first) == [(0, 1, [0, 1]), (0, 2, [2, 3])]
    assert plain(second) == [(1, 2, [0, 1]), (2, 1, [2, 3])]


def test_ranks_with_a_sender_each_are_sent_everything_in_one_round():
    have = arrays({0: range(4), 1: range(4)})

    assert len(plan_rounds(have, arrays({2: range(4), 3: range(4)}))) == 1


def test_rows_enter_another_node_once_however_many_ranks_there_need_them():
    have = arrays({rank: range(8) for rank in range(4)})
    need = arrays({rank: range(8) for rank in range(4, 8)})

    first, second = plan_rounds(have, need, node_of=node_of_4)

    assert sum(len(edge.ids) for edge in first) == 8
    assert {edge.source for edge in second} == {4, 5, 6, 7}


@settings(max_examples=60)
@given(problem=problems(max_rank=7), copies=st.integers(1, 4), nodes=st.booleans())
def test_each_round_is_a_right_plan_and_together_they_bring_what_is_needed(problem, copies, nodes):
    have, need = problem
    need = {8 * copy + rank: ids for rank, ids in need.items() for copy in range(copies)}
    node_of = node_of_4 if nodes else None

    there = dict(have)
    for edges in plan_rounds(have, need, node_of=node_of):
        for edge in edges:
            assert np.isin(edge.ids, there.get(edge.source, [])).all()
            assert not np.isin(edge.ids, there.get(edge.destination, [])).any()
        there = after(there, edges)

    total = sum(len(np.setdiff1d(ids, have.get(rank, []))) for rank, ids in need.items())
    rounds = plan_rounds(have, need, node_of=node_of)
    assert sum(len(edge.ids) for edges in rounds for edge in edges) == total
    for rank, ids in need.items():
        assert np.isin(ids, there.get(rank, [])).all()


class Session:
    """A session whose transport knows the nodes, as runtime.io.Io does."""

    def node_of(self, rank: int) -> int:
        """Four ranks on each node."""
        return rank // 4


def test_remembered_transfers_do_not_keep_an_ended_session_alive():
    session = Session()
    seen = weakref.ref(session)
    edges = plan_rounds(arrays({0: [1, 2], 4: [1, 2]}), arrays({5: [2]}), node_of=session.node_of)

    del session
    gc.collect()

    assert plain(edges[0]) == [(4, 5, [2])]
    assert seen() is None
