"""Plans of boxes against sets of elements, the row planner, and what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.blocks.box import Box, flat_range
from spmdflow.blocks.plan import redistribute, redistribute_through_nodes
from spmdflow.errors import PlanError
from spmdflow.parallel.layout import Layout
from tests.unit.block_proof import Edge, edges_of, verify
from tests.unit.block_reference import elements, layouts, reference_moves
from tests.unit.blocks.test_box import boxes


def node_of_4(rank):
    return rank // 4


def num_elements(plan):
    return sum(edge.box.size for edge in edges_of(plan))


@st.composite
def problems(draw, max_rank=63):
    """Random boxes in up to 3 dimensions, those of a rank may overlap; all needs are held."""
    num_dims = draw(st.integers(0, 3), label="dims")
    shape = [6] * num_dims
    some = st.lists(boxes(num_dims), max_size=3)
    ranks = st.lists(st.integers(0, max_rank), min_size=1, max_size=6, unique=True)
    have = {rank: draw(some) for rank in draw(ranks)}
    have[draw(st.sampled_from(sorted(have)))].append(Box.of_shape(shape))
    need = {rank: draw(some) for rank in draw(ranks)}
    return have, need


@settings(max_examples=300, deadline=None)
@given(problem=problems(), nodes=st.sampled_from([None, node_of_4]))
def test_random_plan_is_right_element_by_element(problem, nodes):
    have, need = problem

    plan = redistribute(have, need, node_of=nodes)

    verify(plan, have, need, node_of=nodes)
    held = {rank: elements(parts) for rank, parts in have.items()}
    for rank, parts in need.items():
        kept = elements(plan.retained[rank])
        wanted = elements(parts)
        assert kept == wanted & held.get(rank, frozenset())
        assert (
            elements([edge.box for edge in edges_of(plan) if edge.destination == rank])
            == wanted - kept
        )
    assert all(elements([edge.box]) <= held[edge.source] for edge in edges_of(plan))
    lacking = sum(
        len(elements(parts) - held.get(rank, frozenset())) for rank, parts in need.items()
    )
    assert num_elements(plan) == lacking, "something is sent twice"


@settings(max_examples=300, deadline=None)
@given(problem=problems(max_rank=11))
def test_what_comes_through_a_node_is_right_element_by_element_and_enters_it_once(problem):
    have, need = problem
    held = {rank: elements(parts) for rank, parts in have.items()}

    first, second = redistribute_through_nodes(have, need, node_of=node_of_4)

    arrived = {}
    for number, plan in enumerate((first, second)):
        for edge in edges_of(plan):
            for item in elements([edge.box]):
                key = (edge.destination, item)
                assert key not in arrived, "an element is sent twice"
                arrived[key] = edge.source
                if number == 0:
                    assert item in held[edge.source]
                else:
                    assert node_of_4(edge.source) == node_of_4(edge.destination)
                    assert (edge.source, item) in arrived, "only what came before is passed on"
    lacking = {
        (rank, item)
        for rank, parts in need.items()
        for item in elements(parts) - held.get(rank, frozenset())
    }
    assert arrived.keys() == lacking
    far = [
        (node_of_4(rank), item)
        for (rank, item), source in arrived.items()
        if node_of_4(source) != node_of_4(rank)
    ]
    near = {(node_of_4(rank), item) for rank, items in held.items() for item in items}
    assert len(set(far)) == len(far) and not near & set(far)


@settings(max_examples=200, deadline=None)
@given(problem=problems(), seed=st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_ranks(problem, seed):
    have, need = problem

    def shuffled(side):
        return {rank: side[rank] for rank in seed.sample(sorted(side), len(side))}

    assert redistribute(shuffled(have), shuffled(need)) == redistribute(have, need)


@settings(max_examples=200, deadline=None)
@given(
    ranges=st.dictionaries(
        st.integers(0, 9),
        st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=3),
        min_size=1,
    ),
    needs=st.dictionaries(st.integers(0, 15), st.tuples(st.integers(0, 15), st.integers(0, 15))),
    nodes=st.sampled_from([None, node_of_4]),
)
def test_one_dimensional_plan_moves_each_element_as_the_row_rules_say(ranges, needs, nodes):
    have = {rank: [Box((tuple(sorted(ends)),)) for ends in some] for rank, some in ranges.items()}
    have[20] = [Box(((0, 15),))]
    need = {rank: [Box((tuple(sorted(ends)),))] for rank, ends in needs.items()}

    plan = redistribute(have, need, node_of=nodes)

    moved = {
        (edge.destination, item): edge.source
        for edge in edges_of(plan)
        for item in range(*edge.box.bounds[0])
    }
    as_sets = [
        {rank: frozenset(item for (item,) in elements(parts)) for rank, parts in side.items()}
        for side in (have, need)
    ]
    assert moved == reference_moves(*as_sets, node_of=nodes)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_generation_shards_are_gathered_within_micro_dp_groups_only(size):
    matrix = (16, 3)
    for layout in layouts(size):
        if layout.pp_size > 1:
            continue  # one matrix lives on one stage
        have = {r: [_rows(matrix, layout.coordinate(r).tp, layout.tp_size)] for r in layout.ranks}
        need = {
            r: [_rows(matrix, layout.generation_coordinate(r).tp, layout.gen_tp_size)]
            for r in layout.ranks
        }

        plan = redistribute(
            have, need, node_of=lambda rank, layout=layout: layout.coordinate(rank).dp
        )

        verify(plan, have, need, node_of=lambda rank, layout=layout: layout.coordinate(rank).dp)
        for edge in edges_of(plan):
            assert edge.source in layout.axis_group(edge.destination, "micro_dp")
        d_g = layout.num_generation_replicas
        moved = num_elements(plan)
        assert moved * layout.tp_size == (d_g - 1) * 16 * 3 * layout.size
        assert all(have[r][0].contains(part) for r in layout.ranks for part in plan.retained[r])


def _rows(shape, part, parts):
    rows = shape[0] // parts
    return Box(((part * rows, (part + 1) * rows), (0, shape[1])))


def test_flat_optimizer_shards_of_4_ranks_become_those_of_3():
    shape = (10, 7)
    have = {rank: flat_range(shape, 70 * rank // 4, 70 * (rank + 1) // 4) for rank in range(4)}
    need = {rank: flat_range(shape, 70 * rank // 3, 70 * (rank + 1) // 3) for rank in range(3)}

    plan = redistribute(have, need)

    verify(plan, have, need)
    assert {(edge.source, edge.destination) for edge in edges_of(plan)} == {(1, 0), (2, 1), (3, 2)}
    assert num_elements(plan) == (23 - 17) + (46 - 35) + (70 - 52)


def test_equal_holders_send_half_of_a_matrix_each_cut_along_its_rows():
    whole = Box.of_shape((8, 4))

    plan = redistribute({0: [whole], 1: [whole]}, {2: [whole]})

    assert edges_of(plan) == (
        Edge(0, 2, Box(((0, 4), (0, 4)))),
        Edge(1, 2, Box(((4, 8), (0, 4)))),
    )


def test_single_row_is_cut_along_the_next_dimension():
    row = Box(((3, 4), (0, 6)))

    plan = redistribute({0: [row], 1: [row]}, {2: [row]})

    assert [edge.box.bounds for edge in edges_of(plan)] == [((3, 4), (0, 3)), ((3, 4), (3, 6))]


def test_replicas_send_a_shard_each_when_many_ranks_need_it():
    whole = Box.of_shape((8, 4))
    layout = Layout.data_parallel((0, 1, 2, 3))

    plan = redistribute(dict.fromkeys(layout.ranks, [whole]), dict.fromkeys(range(4, 8), [whole]))

    assert edges_of(plan) == tuple(Edge(rank, 4 + rank, whole) for rank in range(4))


def test_scalar_and_empty_boxes_are_planned():
    scalar = Box(())
    empty = Box(((2, 2), (0, 4)))

    assert edges_of(redistribute({0: [scalar]}, {1: [scalar]})) == (Edge(0, 1, scalar),)
    assert edges_of(redistribute({0: [empty]}, {1: [empty]})) == ()


def test_element_that_nobody_holds_is_refused_with_rank_and_box():
    have = {0: [Box(((0, 4),))]}
    need = {1: [Box(((2, 7),))]}

    with pytest.raises(PlanError, match=r"rank 1: got box \(\(4, 7\),\) \(3 elements\)"):
        redistribute(have, need)


@pytest.mark.parametrize("num_ranks", [16, 64])
def test_row_shards_become_column_shards_over_many_ranks(num_ranks):
    edge_size = 128
    cut = [edge_size * rank // num_ranks for rank in range(num_ranks + 1)]
    have = {r: [Box(((cut[r], cut[r + 1]), (0, edge_size)))] for r in range(num_ranks)}
    need = {r: [Box(((0, edge_size), (cut[r], cut[r + 1])))] for r in range(num_ranks)}

    plan = redistribute(have, need)

    verify(plan, have, need)
    assert len(edges_of(plan)) == num_ranks * (num_ranks - 1)
    assert sum(edge.source == 0 for edge in edges_of(plan)) == num_ranks - 1
    assert sum(edge.destination == 0 for edge in edges_of(plan)) == num_ranks - 1
