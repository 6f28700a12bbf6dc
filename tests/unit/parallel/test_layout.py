"""The grid of a model's ranks: places, groups, refusals."""

from __future__ import annotations

import dataclasses
import pickle
import re

import pytest

from spmdflow.errors import ConfigError
from spmdflow.parallel.layout import Coordinate, Layout
from tests.unit.block_reference import layouts

WORLD_8 = Layout(tuple(range(8)), pp_size=2, dp_size=2, tp_size=2)


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("tp", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("pp", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("dp", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica", [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ],
)
def test_groups_of_world_8_p2_t2_d2_are_those_of_the_design(axis, groups):
    assert WORLD_8.axis_groups(axis) == groups


@pytest.mark.parametrize("size", range(1, 13))
def test_rank_is_tp_fastest_then_pp_then_dp_in_every_layout(size):
    first = 5

    for layout in layouts(size, first):
        for rank in layout.ranks:
            pp, dp, tp, _ = layout.coordinate(rank)
            assert rank - first == (dp * layout.pp_size + pp) * layout.tp_size + tp
            assert (pp < layout.pp_size, dp < layout.dp_size, tp < layout.tp_size) == (True,) * 3
            assert layout.group_rank(rank) == rank - first


@pytest.mark.parametrize("axis", ["tp", "pp", "dp"])
@pytest.mark.parametrize("size", range(1, 17))
def test_axis_group_holds_the_ranks_that_differ_in_that_axis_only(size, axis):
    for layout in layouts(size):
        for rank in layout.ranks:
            place = layout.coordinate(rank)._asdict() | {axis: None}
            alike = [
                other
                for other in layout.ranks
                if layout.coordinate(other)._asdict() | {axis: None} == place
            ]
            assert layout.axis_group(rank, axis) == tuple(alike)


@pytest.mark.parametrize("size", range(1, 17))
def test_groups_of_every_axis_partition_the_ranks_ascending(size):
    sizes = {"tp": "tp_size", "pp": "pp_size", "dp": "dp_size", "shard": "shard_size"}
    sizes["ep"] = "expert_size"
    for layout in layouts(size, first=3):
        for axis, name in sizes.items():
            groups = layout.axis_groups(axis)
            assert sorted(rank for group in groups for rank in group) == list(layout.ranks)
            assert all(list(group) == sorted(group) for group in groups)
            assert {len(group) for group in groups} == {getattr(layout, name)}


def test_shards_are_neighbouring_dp_ranks_and_replicate_crosses_them():
    layout = Layout.data_parallel((0, 1, 2, 3, 4, 5), shard_size=3)

    assert layout.dp_size == 6
    assert layout.axis_groups("shard") == [(0, 1, 2), (3, 4, 5)]
    assert layout.axis_groups("replicate") == [(0, 3), (1, 4), (2, 5)]


def test_experts_are_divided_over_neighbouring_dp_ranks_of_one_stage():
    layout = Layout(tuple(range(16)), pp_size=2, dp_size=4, tp_size=2, expert_size=2)

    assert layout.axis_groups("ep")[:3] == [(0, 4), (1, 5), (2, 6)]
    assert layout.axis_groups("expert_dp")[:3] == [(0, 8), (1, 9), (2, 10)]
    assert layout.axis_groups("tp_ep") == [
        (0, 1, 4, 5),
        (2, 3, 6, 7),
        (8, 9, 12, 13),
        (10, 11, 14, 15),
    ]
    assert layout.axis_groups("copy") == [tuple(range(8)), tuple(range(8, 16))]
    assert layout.axis_groups("dp")[0] == (0, 4, 8, 12)
    assert str(layout) == "t2p2d4e2"


def test_ranks_that_generate_divide_whole_experts_or_slices():
    sizes = {"tp_size": 2, "dp_size": 2, "gen_tp_size": 4}
    assert str(Layout((0, 1, 2, 3), **sizes, gen_expert_size=4)).endswith("-ge4")
    with pytest.raises(ConfigError, match="got gen_expert_size 2, expected 1 or gen_tp_size 4"):
        Layout((0, 1, 2, 3), **sizes, gen_expert_size=2)


def test_ranks_that_divide_rows_lie_between_stages_and_tensor_ranks():
    layout = Layout(tuple(range(16)), pp_size=2, dp_size=2, tp_size=2, cp_size=2)
    for rank in layout.ranks:
        pp, dp, tp, cp = layout.coordinate(rank)
        assert rank == ((dp * 2 + pp) * 2 + cp) * 2 + tp
        assert layout.weight_rank(rank) == dp * 2 + cp
    assert layout.axis_groups("cp")[:3] == [(0, 2), (1, 3), (4, 6)]
    assert layout.axis_groups("weights")[:2] == [(0, 2, 8, 10), (1, 3, 9, 11)]
    assert layout.axis_groups("replica") == [tuple(range(8)), tuple(range(8, 16))]
    assert layout.shard_size == 4 and layout.num_generation_replicas == 2
    assert sorted(map(layout.generation_replica, layout.ranks)) == sorted([0, 1, 2, 3] * 4)
    assert str(layout) == "t2p2d2c2"


def test_experts_are_divided_inside_a_shard():
    with pytest.raises(ConfigError, match="got expert_size 3, expected a divisor of the 4 data-p"):
        Layout(tuple(range(4)), dp_size=4, expert_size=3)


def test_ranks_of_a_pool_need_not_be_neighbours():
    layout = Layout((1, 4, 6, 9), dp_size=2, tp_size=2)

    assert layout.axis_groups("tp") == [(1, 4), (6, 9)]
    assert layout.coordinate(6) == Coordinate(pp=0, dp=1, tp=0, cp=0)
    assert layout.group_rank(9) == 3


def test_layout_that_travelled_as_plain_data_is_equal():
    plain = dataclasses.asdict(WORLD_8)

    assert Layout(**plain | {"ranks": list(plain["ranks"])}) == WORLD_8
    assert pickle.loads(pickle.dumps(WORLD_8)) == WORLD_8
    assert hash(Layout(tuple(range(8)), 2, 2, 2)) == hash(WORLD_8)


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        ((0, 1, 2), {"tp_size": 2}, "tp_size 2 = 2, expected 3, the number of ranks"),
        ((0, 1), {"dp_size": -1, "tp_size": -2}, "each size at least 1"),
        ((0, 1), {"dp_size": 0}, "= 0, expected 2"),
        ((1, 0), {"dp_size": 2}, r"got ranks (1, 0), expected .* list them as (0, 1)"),
        ((1, 1), {"dp_size": 2}, "each once; list them as (1,)"),
        ((-1, 0), {"dp_size": 2}, "none negative"),
        ((), {}, "at least one"),
        (
            tuple(range(6)),
            {"dp_size": 6, "shard_size": 4},
            "shard_size 4, expected a divisor of dp_size * cp_size = 6; choose one of [1, 2, 3, 6]",
        ),
        (
            (0, 1, 2, 3),
            {"tp_size": 4, "gen_tp_size": 3},
            "gen_tp_size 3 * gen_pp_size 1, expected a divisor of the 4 ranks (0, 1, 2, 3); "
            "choose a product among [1, 2, 4]",
        ),
        (
            (0, 1),
            {"pp_size": 2, "gen_pp_size": 4},
            "gen_tp_size 1 * gen_pp_size 4, expected a divisor of the 2 ranks (0, 1)",
        ),
    ],
)
def test_layout_that_cannot_work_is_refused_with_got_expected_do(ranks, sizes, message):
    pattern = re.escape(message).replace(r"\.\*", ".*")

    with pytest.raises(ConfigError, match=pattern):
        Layout(ranks, **sizes)


def test_rank_outside_the_pool_is_refused():
    with pytest.raises(ConfigError, match="got rank 8, expected one of"):
        WORLD_8.coordinate(8)
    with pytest.raises(ConfigError, match="got rank 9"):
        WORLD_8.axis_group(9, "tp")


def test_unknown_axis_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="got axis 'xp', expected one of copy, cp, dp"):
        WORLD_8.axis_groups("xp")


def test_refusal_of_a_large_pool_does_not_list_every_rank():
    with pytest.raises(ConfigError) as refusal:
        Layout(tuple(range(1000)), dp_size=999)

    assert "(0, 1, 2, ... 999; 1000 ranks)" in str(refusal.value)
    assert len(str(refusal.value)) < 250


def test_short_name_shows_sizes_and_generation_where_it_differs():
    assert str(Layout(tuple(range(4)), tp_size=2, dp_size=2)) == "t2p1d2"
    assert str(Layout(tuple(range(4)), tp_size=4, gen_tp_size=2)) == "t4p1d1-g(t2p1x2)"
