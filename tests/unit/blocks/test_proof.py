"""`verify` and `verify_rows` refuse every plan that was tampered with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spmdflow.blocks.box import Box
from spmdflow.blocks.plan import Plan, redistribute
from spmdflow.blocks.rows import RowEdge, redistribute_rows
from spmdflow.errors import PlanError
from tests.unit.block_proof import Edge, Edges, edges_of, verify, verify_rows
from tests.unit.block_reference import arrays, distinct_rows
from tests.unit.blocks.test_plan import problems as box_problems
from tests.unit.blocks.test_rows import plain
from tests.unit.blocks.test_rows import problems as row_problems

RowEdges = list[RowEdge]


def with_edge(edges: Sequence, place: int, *new: object) -> list:
    return [*edges[:place], *new, *edges[place + 1 :]]


def changed(edge: RowEdge, **facts: object) -> RowEdge:
    return dataclasses.replace(edge, **facts)


def row_mutations(edges: RowEdges) -> Iterator[tuple[str, RowEdges]]:
    """(name, plan) of everything that can go wrong with one or two edges."""
    for place, edge in enumerate(edges):
        ids = edge.ids
        yield "drop an edge", with_edge(edges, place)
        yield "repeat an edge", with_edge(edges, place, edge, edge)
        yield (
            "turn an edge",
            with_edge(edges, place, RowEdge(edge.destination, edge.source, edge.ids)),
        )
        yield "drop a row", with_edge(edges, place, changed(edge, ids=ids[1:]))
        yield "repeat a row", with_edge(edges, place, changed(edge, ids=np.append(ids, ids[-1])))
        yield (
            "invent a row",
            with_edge(edges, place, changed(edge, ids=np.append(ids, ids[-1] + 1))),
        )
        yield "send to a stranger", with_edge(edges, place, changed(edge, destination=999))
        yield "take from a stranger", with_edge(edges, place, changed(edge, source=999))
        if len(ids) > 1:
            yield "turn the rows round", with_edge(edges, place, changed(edge, ids=ids[::-1]))
            halves = changed(edge, ids=ids[:1]), changed(edge, ids=ids[1:])
            yield "split an edge", with_edge(edges, place, *halves)
    for one, two in combinations(range(len(edges)), 2):
        yield from swaps(edges, one, two)


def swaps(edges: RowEdges, one: int, two: int) -> Iterator[tuple[str, RowEdges]]:
    """Two edges change places, ends or rows; the result is sorted again too."""
    first = edges[one]
    second = edges[two]
    yield "swap two edges", with_edge(with_edge(edges, one, second), two, first)
    for fact in ("source", "destination", "ids"):
        mine = getattr(first, fact)
        theirs = getattr(second, fact)
        if np.array_equal(mine, theirs):
            continue
        swapped = with_edge(edges, one, changed(first, **{fact: theirs}))
        swapped = with_edge(swapped, two, changed(second, **{fact: mine}))
        yield f"swap {fact}", swapped
        again = sorted(swapped, key=lambda edge: (edge.source, edge.destination))
        if plain(again) != plain(edges):
            yield f"swap {fact} and sort", again


def box_mutations(plan: Plan) -> Iterator[tuple[str, Edges]]:
    """The same for plans of boxes."""
    edges = edges_of(plan)
    for place, edge in enumerate(edges):
        yield "drop an edge", _plan(plan, with_edge(edges, place))
        yield "repeat an edge", _plan(plan, with_edge(edges, place, edge, edge))
        turned = dataclasses.replace(edge, source=edge.destination, destination=edge.source)
        yield "turn an edge", _plan(plan, with_edge(edges, place, turned))
        for dim in range(len(edge.box.bounds)):
            for smaller in edge.box.cut(dim, edge.box.bounds[dim][0] + 1):
                if smaller != edge.box:
                    less = dataclasses.replace(edge, box=smaller)
                    yield "shrink a box", _plan(plan, with_edge(edges, place, less))
            grown = list(edge.box.bounds)
            grown[dim] = (grown[dim][0], grown[dim][1] + 1)
            more = dataclasses.replace(edge, box=Box(tuple(grown)))
            yield "grow a box", _plan(plan, with_edge(edges, place, more))
    for one, two in combinations(range(len(edges)), 2):
        first = edges[one]
        second = edges[two]
        yield "swap two edges", _plan(plan, with_edge(with_edge(edges, one, second), two, first))
        for fact in ("source", "destination", "box"):
            mine = getattr(first, fact)
            theirs = getattr(second, fact)
            if mine != theirs:
                swapped = with_edge(edges, one, dataclasses.replace(first, **{fact: theirs}))
                swapped = with_edge(swapped, two, dataclasses.replace(second, **{fact: mine}))
                yield f"swap {fact}", _plan(plan, swapped)
                if sorted(swapped) != list(edges):
                    yield f"swap {fact} and sort", _plan(plan, sorted(swapped))
    for rank, boxes in plan.retained.items():
        yield "forget a rank", Edges(edges, {r: b for r, b in plan.retained.items() if r != rank})
        for place, box in enumerate(boxes):
            for new in ((), (box, box)):
                kept = tuple(with_edge(boxes, place, *new))
                yield "drop or repeat what is kept", Edges(edges, {**plan.retained, rank: kept})


def _plan(plan: Plan, edges: Sequence[Edge]) -> Edges:
    return Edges(tuple(edges), plan.retained)


def assert_refused(verifier: Callable[[], None], name: str) -> None:
    """Swaps may leave a right plan that is not the one all derive; other faults are proven."""
    try:
        verifier()
    except PlanError as error:
        assert "swap" in name or "another edge" not in str(error), (name, str(error))
        return
    pytest.fail(f"{name}: was not noticed")


@settings(max_examples=120, deadline=None)
@given(problem=row_problems(num_ids=12), data=st.data())
def test_every_mutation_of_a_random_row_plan_is_refused(problem, data):
    have, need = problem
    edges = redistribute_rows(have, need)
    assume(edges)

    mutations = list(row_mutations(edges))
    if len(mutations) > 60:
        mutations = data.draw(st.lists(st.sampled_from(mutations), min_size=40, max_size=60))

    for name, mutant in mutations:
        assert_refused(lambda mutant=mutant: verify_rows(mutant, have, need), name)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_mutation_of_every_protocol_pair_is_refused(size):
    for have in map(arrays, distinct_rows("holds", size, 0, 5)):
        for need in map(arrays, distinct_rows("distribute", size, size // 2, 5)):
            for name, mutant in row_mutations(redistribute_rows(have, need)):
                assert_refused(lambda m=mutant, h=have, n=need: verify_rows(m, h, n), name)


@settings(max_examples=120, deadline=None)
@given(problem=box_problems(max_rank=7), data=st.data())
def test_every_mutation_of_a_random_box_plan_is_refused(problem, data):
    have, need = problem
    plan = redistribute(have, need)
    mutations = list(box_mutations(plan))
    assume(mutations)
    if len(mutations) > 60:
        mutations = data.draw(st.lists(st.sampled_from(mutations), min_size=40, max_size=60))

    for name, mutant in mutations:
        assert_refused(lambda mutant=mutant: verify(mutant, have, need), name)


def test_right_plan_of_other_senders_is_refused_because_ranks_would_disagree():
    have = arrays({0: [1], 1: [1]})
    need = arrays({4: [1], 5: [1]})
    crossed = [RowEdge(0, 5, have[0]), RowEdge(1, 4, have[1])]

    with pytest.raises(PlanError, match="got another edge 0 of 2 than every rank derives"):
        verify_rows(crossed, have, need)


def test_plan_made_without_nodes_is_refused_where_nodes_matter():
    have = arrays({0: [1], 1: [1]})
    need = arrays({2: [1]})

    with pytest.raises(PlanError, match="another edge"):
        verify_rows(redistribute_rows(have, need), have, need, node_of=lambda r: (r + 1) // 2)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 2, [1, 2]), (0, 2, [3])], r"got edge 1 \(0, 2\) after \(0, 2\)"),
        ([(0, 2, [3, 1, 2])], r"edge 0 -> 2: ids: got \[3, 1, 2\], expected at least one, asc"),
        ([(0, 2, [])], "edge 0 -> 2: ids: got"),
        ([(1, 2, [1, 2, 3])], "edge 1 -> 2: rows that the source lacks: got .1 2., expected none"),
        ([(0, 2, [1, 2, 3]), (1, 2, [3])], "rank 2: rows sent twice: got .3."),
        ([(0, 2, [1, 2, 3, 4])], "rank 2: rows sent that are already there: got .4."),
        ([(0, 2, [1, 2, 3, 5])], "rank 2: rows sent that are not needed: got .5."),
        ([(0, 2, [1, 3])], "rank 2: rows that nobody sends: got .2."),
        ([(2, 2, [4])], "edge 2 -> 2: source: got 2, expected another rank"),
    ],
)
def test_refusal_names_the_exact_fault(edges, message):
    have = arrays({0: range(6), 1: [3], 2: [4]})
    need = arrays({2: [1, 2, 3, 4]})
    plan = [RowEdge(source, to, np.array(ids, dtype=np.int64)) for source, to, ids in edges]

    with pytest.raises(PlanError, match=message):
        verify_rows(plan, have, need)


TOP = Box(((0, 2), (0, 3)))
BOTTOM = Box(((2, 4), (0, 3)))
WHOLE = Box(((0, 4), (0, 3)))


@pytest.mark.parametrize(
    ("edges", "kept", "message"),
    [
        ([Edge(1, 2, BOTTOM), Edge(0, 2, TOP)], [], r"got edge 1 \(0, 2, .* after \(1, 2"),
        ([Edge(0, 2, TOP)], [], r"rank 2: box that nobody sends: got \(\(2, 4\), \(0, 3\)\), exp"),
        ([Edge(0, 2, BOTTOM)], [], r"boxes that the source lacks: got \[Box\(bounds=\(\(2, 4\)"),
        ([Edge(0, 3, TOP)], [], "rank 3: box sent that is not needed: got "),
        ([Edge(0, 2, Box(((0, 0), (0, 3))))], [], "elements: got 0, expected at least 1"),
        ([Edge(0, 0, TOP)], [], "source: got 0, expected another rank"),
        (
            [Edge(0, 2, TOP), Edge(1, 2, Box(((1, 4), (0, 3))))],
            [],
            r"rank 2: box sent twice: got \(\(1, 4\), \(0, 3\)\), expected none",
        ),
        (
            [Edge(0, 2, TOP), Edge(1, 2, BOTTOM)],
            [TOP],
            "box kept that is not held and needed, once",
        ),
    ],
)
def test_refusal_of_boxes_names_the_exact_fault(edges, kept, message):
    have = {0: [TOP], 1: [WHOLE], 2: []}

    with pytest.raises(PlanError, match=message):
        verify(Edges(tuple(edges), {2: tuple(kept)}), have, {2: [WHOLE]})


def test_box_that_is_sent_though_it_is_there_is_refused():
    have = {0: [WHOLE], 2: [TOP]}
    need = {2: [WHOLE]}

    with pytest.raises(PlanError, match="rank 2: box sent that is already there: got "):
        verify(Edges((Edge(0, 2, WHOLE),), {2: ()}), have, need)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({2: ()}, r"rank 2: box that nobody sends: got \(\(0, 2\), \(0, 3\)\)"),
        ({2: (TOP, TOP)}, "box kept that is not held and needed, once"),
        ({}, r"kept: got \[\], expected \[2\]"),
    ],
)
def test_kept_boxes_that_are_not_what_stays_are_refused(kept, message):
    have = {0: [WHOLE], 2: [TOP]}
    need = {2: [WHOLE]}

    with pytest.raises(PlanError, match=message):
        verify(Edges((Edge(0, 2, BOTTOM),), kept), have, need)
