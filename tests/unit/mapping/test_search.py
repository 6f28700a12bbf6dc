"""The search of placements equals Algorithm 1 tried out, on every partition of random tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.mapping.search import (
    Options,
    model_sets,
    pareto,
    partitions,
    select_unbeaten,
    select_undominated,
)
from tests.unit.mapping_reference import (
    Choice,
    Family,
    algorithm_1,
    algorithm_1_of_many,
    d_cost,
    get_placements,
    printed_algorithm_1,
    random_costs,
    search,
    table_of,
)

FAMILIES = [
    (Family(2, 6, 3, 1, 10, 0.0), 1500),
    (Family(2, 6, 3, 3, 5, 0.3), 1500),
    (Family(3, 6, 3, 1, 1000, 0.1), 1500),
    (Family(3, 6, 2, 2, 4, 0.3), 1500),
    (Family(3, 7, 3, 2, 20, 0.2), 1200),
    (Family(4, 6, 3, 1, 6, 0.2), 1000),
    (Family(4, 7, 3, 2, 30, 0.4), 800),
    (Family(4, 6, 4, 2, 3, 0.6), 700),
    (Family(5, 6, 3, 1, 8, 0.2), 500),
    (Family(5, 7, 3, 2, 12, 0.5), 300),
]
"""10,500 tables: ties (few different costs), holes, several vectors a set."""


def test_families_are_at_least_ten_thousand_tables() -> None:
    assert sum(count for _, count in FAMILIES) >= 10_000


def _compare(family: Family, count: int, seed: int) -> None:
    blocks = model_sets(family.number)
    costs = random_costs(family, count, seed)
    expected = np.sort(algorithm_1_of_many(family, costs, blocks), axis=1)
    for own, wanted in zip(costs, expected):
        table = table_of(own, blocks)
        fits = wanted[np.isfinite(wanted)].tolist()

        found = search(table, family.number, family.size, keep=len(wanted))
        best = search(table, family.number, family.size, keep=1)

        assert [choice.cost for choice in found] == fits
        assert [choice.cost for choice in best] == fits[:1]
        for choice in (*found[:1], *best):
            _check_choice(choice, table, family)


def _check_choice(choice: Choice, table: dict, family: Family) -> None:
    """It is a partition, it fits, and it costs what it says."""
    options = [table[block] for block in choice.blocks]
    sizes = [int(one.sizes[i]) for one, i in zip(options, choice.indices)]
    models = sorted(model for block in choice.blocks for model in block)
    assert models == list(range(family.number))
    assert sum(sizes) <= family.size
    assert d_cost([one.costs[i] for one, i in zip(options, choice.indices)]) == choice.cost


@pytest.mark.parametrize(("family", "count"), FAMILIES, ids=str)
def test_every_partition_costs_what_trying_everything_finds(family: Family, count: int) -> None:
    _compare(family, count // 25, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), FAMILIES, ids=str)
def test_ten_thousand_tables_cost_what_trying_everything_finds(family: Family, count: int) -> None:
    _compare(family, count, seed=2)


def test_the_vectorised_reference_equals_the_verbatim_one() -> None:
    family = Family(3, 5, 3, 2, 6, 0.3)
    blocks = model_sets(3)
    costs = random_costs(family, 20, seed=3)

    quick = algorithm_1_of_many(family, costs, blocks)

    for own, row in zip(costs, quick):
        verbatim = algorithm_1(table_of(own, blocks), family.number, family.size)
        assert [verbatim.get(parts, np.inf) for parts in get_placements(3)] == row.tolist()


@pytest.mark.parametrize(("number", "bell"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203)])
def test_partitions_are_all_of_them_once(number: int, bell: int) -> None:
    found = [tuple(sorted(blocks)) for blocks in partitions(number)]

    assert len(found) == len(set(found)) == bell
    if number <= 5:
        assert set(found) == set(get_placements(number))


def test_the_kept_placement_costs_what_it_says_where_the_printed_algorithm_1_does_not() -> None:
    """Printed, Algorithm 1 keeps a reference to a placement that the next allocation updates."""
    family = Family(3, 5, 3, 1, 50, 0.0)
    blocks = model_sets(3)
    wrong = 0
    for own in random_costs(family, 50, seed=4):
        table = table_of(own, blocks)

        cost, mapping = printed_algorithm_1(table, family.number, family.size)
        ours = search(table, family.number, family.size, keep=1)[0]

        held = d_cost([table[block].costs[i] for block, i in mapping.items()])
        wrong += held != cost
        assert ours.cost == cost
        _check_choice(ours, table, family)
    assert wrong > 40


def test_ties_are_answered_with_fewer_pools_and_always_the_same() -> None:
    same = Options(np.array([1, 2]), np.ones((2, 3)))
    table = dict.fromkeys(model_sets(3), same)

    found = [search(table, 3, 6, keep=9) for _ in range(3)]

    assert found[0] == found[1] == found[2]
    assert [len(choice.blocks) for choice in found[0]] == [1, 2, 2, 2, 3]
    assert found[0][0].blocks == ((0, 1, 2),)


def test_nothing_fits_gives_no_choice() -> None:
    table = {block: Options(np.array([4]), np.ones((1, 2))) for block in model_sets(2)}

    assert search(table, 2, 3, keep=5) == []


points = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(st.integers(0, 4), min_size=k, max_size=k), max_size=25)
)


@settings(max_examples=200, deadline=None)
@given(points)
def test_pareto_keeps_what_no_other_row_matches_or_beats(rows: list[list[int]]) -> None:
    table = np.array(rows, dtype=np.float64).reshape(len(rows), -1 if rows else 1)

    kept = pareto(table)

    front = {tuple(row) for row in table[kept]}
    assert len(front) == len(kept)
    for row in table:
        beaten = any((other <= row).all() and (other < row).any() for other in table)
        assert (tuple(row) in front) == (not beaten)


@settings(max_examples=200, deadline=None)
@given(points)
def test_unbeaten_leaves_out_only_rows_that_the_front_beats(rows: list[list[int]]) -> None:
    table = np.array(rows, dtype=np.float64).reshape(len(rows), -1 if rows else 1)
    front = table[pareto(table)][:3]

    kept = set(select_unbeaten(table, front).tolist())

    for number, row in enumerate(table):
        beaten = any((one <= row).all() and (one < row).any() for one in front)
        assert (number in kept) == (not beaten)


def test_undominated_options_keep_their_numbers() -> None:
    sizes = np.array([1, 2, 2, 3])
    costs = np.array([[5.0, 5.0], [5.0, 5.0], [1.0, 9.0], [np.inf, 0.0]])

    options, numbers = select_undominated(Options(sizes, costs))

    assert sorted(numbers.tolist()) == [0, 2]
    assert options.costs.tolist() == costs[numbers].tolist()
