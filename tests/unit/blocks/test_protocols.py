"""Every protocol pair on every layout of small worlds: the plan is right and the reference's.

Plans depend on `holds` of the producer and `distribute` of the consumer alone, so each distinct
pair of the two is planned once, for every layout (p, t, d, p_g, t_g) and protocol that gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from spmdflow.blocks.rows import redistribute_rows
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.protocol import BUILT_IN, protocol
from tests.unit.block_proof import verify_rows
from tests.unit.block_reference import (
    arrays,
    distinct_rows,
    layouts,
    moves_of,
    reference_moves,
    sets,
)

Positions = dict[int, list[int]]

distinct = cache(distinct_rows)


def row_counts(num_producers: int, num_consumers: int) -> list[int]:
    """None, one, fewer and more than ranks, uneven; and those that ALL_TO_ALL demands."""
    return sorted({0, 1, 5, 9, num_producers, num_consumers})


def pairs(
    num_producers: int, num_consumers: int, shift: int, num_rows: int
) -> Iterator[tuple[Positions, Positions]]:
    """(have, need) of producers on ranks from 0 and consumers on ranks from shift."""
    for have in distinct("holds", num_producers, 0, num_rows):
        for need in distinct("distribute", num_consumers, shift, num_rows):
            yield have, need


def check(have: Positions, need: Positions) -> None:
    edges = redistribute_rows(arrays(have), arrays(need))
    keys = [(edge.source, edge.destination) for edge in edges]
    assert keys == sorted(set(keys))
    assert all((edge.ids[1:] > edge.ids[:-1]).all() for edge in edges)
    assert moves_of(edges) == reference_moves(sets(have), sets(need))


@pytest.mark.parametrize(
    "num_producers",
    [1, 2, 3, 4, *(pytest.param(size, marks=pytest.mark.drill) for size in (5, 6, 7, 8))],
)
def test_every_protocol_pair_is_planned_right_in_every_world_of_up_to_8(num_producers):
    for num_consumers in range(1, 9):
        for shift in range(min(num_producers, 8 - num_consumers) + 1):
            for num_rows in row_counts(num_producers, num_consumers):
                for have, need in pairs(num_producers, num_consumers, shift, num_rows):
                    check(have, need)


@pytest.mark.parametrize("size", range(1, 9))
def test_every_protocol_pair_on_the_same_ranks_is_proven(size):
    for num_rows in row_counts(size, size):
        for have, need in pairs(size, size, 0, num_rows):
            held = arrays(have)
            needed = arrays(need)
            verify_rows(redistribute_rows(held, needed), held, needed)


@pytest.mark.slow
@pytest.mark.parametrize("num_producers", range(1, 17))
def test_every_protocol_pair_is_planned_right_in_every_world_of_up_to_16(num_producers):
    for num_consumers in range(1, 17):
        for shift in range(min(num_producers, 16 - num_consumers) + 1):
            if max(num_producers, shift + num_consumers) <= 8:
                continue  # a world of the default suite
            for num_rows in row_counts(num_producers, num_consumers):
                for have, need in pairs(num_producers, num_consumers, shift, num_rows):
                    check(have, need)


@pytest.mark.parametrize("size", range(1, 9))
def test_models_with_the_same_layout_on_the_same_ranks_exchange_nothing(size):
    for layout in layouts(size):
        for name in (rules.name for rules in BUILT_IN):
            given = arrays(protocol(name).distribute(layout, size))
            held = arrays(protocol(name).holds(layout, size))
            keeps = {rank: given[rank] for rank in held}
            assert redistribute_rows(held, keeps) == []


def test_3d_proto_output_on_stages_reaches_the_next_3d_proto_call_of_the_same_ranks():
    layout = Layout(tuple(range(8)), pp_size=2, dp_size=2, tp_size=2)
    rules = protocol("3D_PROTO")

    edges = redistribute_rows(arrays(rules.holds(layout, 8)), arrays(rules.distribute(layout, 8)))

    moved = [(edge.source, edge.destination, edge.ids.tolist()) for edge in edges]
    assert moved == [
        (2, 0, [0, 1, 2, 3]),
        (3, 1, [0, 1, 2, 3]),
        (6, 4, [4, 5, 6, 7]),
        (7, 5, [4, 5, 6, 7]),
    ]
