"""Generation groups inside the training grid (paper section 5)."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from spmdflow.parallel.layout import GenerationCoordinate, Layout
from tests.unit.block_reference import layouts


def test_training_1_4_2_to_generation_1_2_2_2_gives_the_groups_of_the_paper():
    layout = Layout(tuple(range(8)), pp_size=1, tp_size=4, dp_size=2, gen_tp_size=2)

    assert layout.num_generation_replicas == 2
    assert layout.axis_groups("gen_tp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.axis_groups("micro_dp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [layout.micro_dp(rank) for rank in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]


def test_training_2_2_1_to_generation_1_1_4_makes_every_rank_a_replica():
    layout = Layout((0, 1, 2, 3), pp_size=2, tp_size=2, gen_pp_size=1, gen_tp_size=1)

    assert layout.num_generation_replicas == 4
    assert layout.axis_groups("micro_dp") == [(0, 1, 2, 3)]
    assert layout.axis_groups("gen_replica") == [(0,), (1,), (2,), (3,)]


def test_stages_that_merge_are_neighbours():
    layout = Layout((0, 1, 2, 3), pp_size=4, gen_pp_size=2)

    assert layout.axis_groups("gen_pp") == [(0, 2), (1, 3)]
    assert layout.generation_coordinate(3) == GenerationCoordinate(pp=1, micro_dp=1, tp=0)


def test_generation_sizes_left_out_are_those_of_training():
    layout = Layout(tuple(range(4)), pp_size=2, tp_size=2)

    assert (layout.gen_pp_size, layout.gen_tp_size) == (2, 2)
    assert layout.num_generation_replicas == 1
    assert layout.axis_groups("gen_tp") == layout.axis_groups("tp")
    assert layout.axis_groups("gen_pp") == layout.axis_groups("pp")
    assert layout == Layout(tuple(range(4)), pp_size=2, tp_size=2, gen_tp_size=2)


@pytest.mark.parametrize("size", range(1, 17))
def test_generation_groups_partition_the_ranks_of_every_layout(size):
    for layout in layouts(size, first=2):
        sizes = {
            "gen_tp": layout.gen_tp_size,
            "gen_pp": layout.gen_pp_size,
            "micro_dp": layout.num_generation_replicas,
            "gen_replica": layout.gen_tp_size * layout.gen_pp_size,
        }
        for axis, expected in sizes.items():
            groups = layout.axis_groups(axis)
            assert sorted(rank for group in groups for rank in group) == list(layout.ranks)
            assert all(list(group) == sorted(group) for group in groups)
            assert {len(group) for group in groups} == {expected}


@pytest.mark.parametrize("size", range(1, 17))
def test_coordinates_follow_the_formulas_and_name_the_place_in_each_group(size):
    for layout in layouts(size):
        for rank in layout.ranks:
            pp, _, tp, _ = layout.coordinate(rank)
            tp_ratio = layout.tp_size // layout.gen_tp_size
            pp_ratio = layout.pp_size // layout.gen_pp_size
            place = layout.generation_coordinate(rank)
            assert place.tp == tp // tp_ratio
            assert place.pp == pp // pp_ratio
            assert place.micro_dp == (pp % pp_ratio) * tp_ratio + tp % tp_ratio
            assert layout.axis_group(rank, "gen_tp").index(rank) == place.tp
            assert layout.axis_group(rank, "gen_pp").index(rank) == place.pp
            assert layout.axis_group(rank, "micro_dp").index(rank) == place.micro_dp


@pytest.mark.parametrize("size", range(1, 17))
def test_generation_replicas_are_listed_by_dp_then_micro_dp(size):
    for layout in layouts(size):
        d_g = layout.num_generation_replicas
        for number, group in enumerate(layout.axis_groups("gen_replica")):
            places = {(layout.coordinate(r).dp, layout.micro_dp(r)) for r in group}
            assert places == {divmod(number, d_g)}


@pytest.mark.parametrize("size", range(1, 17))
def test_each_training_shard_lies_inside_its_own_ranks_generation_shard(size):
    for layout in layouts(size):
        for rank in layout.ranks:
            train = layout.coordinate(rank)
            generate = layout.generation_coordinate(rank)
            for axis, train_size, generate_size in (
                ("tp", layout.tp_size, layout.gen_tp_size),
                ("pp", layout.pp_size, layout.gen_pp_size),
            ):
                inner = getattr(train, axis)
                outer = getattr(generate, axis)
                start = Fraction(inner, train_size)
                stop = Fraction(inner + 1, train_size)
                assert Fraction(outer, generate_size) <= start
                assert stop <= Fraction(outer + 1, generate_size)


@pytest.mark.parametrize("size", range(1, 17))
def test_micro_dp_group_holds_exactly_one_generation_shard_between_its_ranks(size):
    for layout in layouts(size):
        for group in layout.axis_groups("micro_dp"):
            shards = {
                (layout.generation_coordinate(r).pp, layout.generation_coordinate(r).tp)
                for r in group
            }
            pieces = {(layout.coordinate(r).pp, layout.coordinate(r).tp) for r in group}
            assert len(shards) == 1
            assert len(pieces) == len(group) == layout.num_generation_replicas


def test_generation_over_more_ranks_than_a_training_replica_takes_neighbours() -> None:
    layout = Layout((0, 1, 2, 3, 4, 5, 6, 7), dp_size=4, tp_size=2, gen_tp_size=4)

    assert not layout.nests
    assert layout.generation_dp_size == 2
    assert layout.axis_groups("gen_replica") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.axis_groups("gen_tp") == layout.axis_groups("gen_replica")
    assert layout.axis_groups("micro_dp") == [layout.ranks]
    assert [layout.generation_replica(rank) for rank in layout.ranks] == [0] * 4 + [1] * 4
    assert layout.axis_groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert str(layout) == "t2p1d4-g(t4p1x2)"


def test_generation_replicas_of_any_sizes_partition_the_pool_and_agree_with_the_coordinates() -> (
    None
):
    for sizes in product([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8]):
        tp_size, pp_size, gen_tp_size, gen_pp_size = sizes
        if 8 % (tp_size * pp_size) or 8 % (gen_tp_size * gen_pp_size):
            continue
        layout = Layout(
            tuple(range(8)),
            tp_size=tp_size,
            pp_size=pp_size,
            dp_size=8 // (tp_size * pp_size),
            gen_tp_size=gen_tp_size,
            gen_pp_size=gen_pp_size,
        )
        replicas = layout.axis_groups("gen_replica")

        assert sorted(rank for ranks in replicas for rank in ranks) == list(range(8))
        for number, ranks in enumerate(replicas):
            assert len(ranks) == gen_tp_size * gen_pp_size
            places = [layout.generation_coordinate(rank) for rank in ranks]
            assert {(place.pp, place.tp) for place in places} == set(
                product(range(gen_pp_size), range(gen_tp_size))
            )
            assert {layout.generation_replica(rank) for rank in ranks} == {number}
        embedding = {rank for ranks in layout.axis_groups("embedding") for rank in ranks}
        assert embedding == {
            rank for rank in range(8) if layout.coordinate(rank).pp in (0, pp_size - 1)
        }
