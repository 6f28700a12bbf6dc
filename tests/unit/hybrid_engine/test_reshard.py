"""Reshard plans: they deliver, within their scope, their buckets and their predicted bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from bench._amount import received_by, sent_by, staging_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.errors import PlanError
from spmdflow.hybrid_engine.reshard import Copies, boxes_of, plan_reshard, scopes_of
from spmdflow.parallel.layout import Layout
from spmdflow.plan.check import check_weight_copies
from spmdflow.weights.ranks import megatron_tables, row_tables, vllm_tables, whole_tables
from tests.unit.block_reference import elements
from tests.unit.resharding import arch_for, crossing_layouts, execute, nested_layouts

SMALL = {"num_hidden_layers": 8, "vocab_size": 60}


def _plan(have, need, scopes, bucket_bytes=1 << 30, node_of=None, rank=None):
    return plan_reshard(
        boxes_of(have),
        boxes_of(need),
        scopes=scopes,
        element_bytes=4,
        bucket_bytes=bucket_bytes,
        node_of=node_of,
        rank=rank,
    )


def _tables(arch, layout):
    return megatron_tables(arch, layout, vocab_multiple=64 * 105), vllm_tables(arch, layout)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.drill), True])
def test_every_nested_layout_is_resharded_inside_its_micro_dp_groups(tied):
    for layout in nested_layouts():
        arch = arch_for(layout.tp_size, tie_word_embeddings=tied, vocab_size=6717)
        have, need = _tables(arch, layout)

        plan = _plan(have, need, scopes_of(layout, layout))
        arrived = execute(arch, plan, have, need) if layout.size in (4, 6) else None

        assert plan.scope == "micro_dp", layout
        assert list(plan.groups) == layout.axis_groups("micro_dp")
        if arrived is not None:
            assert arrived == {rank: plan.received_bytes(rank) for rank in layout.ranks}
        if layout.generation_dp_size == layout.dp_size:
            assert plan.buckets == (), "nothing is missing where the layouts are equal"


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.drill)])
def test_layouts_that_cross_training_replicas_are_resharded_over_the_pool(world):
    for layout in [each for each in crossing_layouts(world) if each.size == world]:
        if max(layout.tp_size, layout.gen_tp_size) > 4 or layout.gen_pp_size > 4:
            continue
        arch = arch_for(4, num_hidden_layers=8, vocab_size=60)
        have = megatron_tables(arch, layout, vocab_multiple=64)
        need = vllm_tables(arch, layout)

        plan = _plan(have, need, scopes_of(layout, layout))
        arrived = execute(arch, plan, have, need)

        assert plan.scope == "pool"
        assert arrived == {rank: plan.received_bytes(rank) for rank in layout.ranks}


@pytest.mark.parametrize(
    ("sizes", "scope"),
    [
        ({"tp_size": 4, "gen_tp_size": 2}, "replica"),
        ({"tp_size": 4, "gen_tp_size": 1}, "micro_dp"),
        ({"tp_size": 4, "gen_tp_size": 4}, "replica"),
        ({"tp_size": 4, "dp_size": 2, "gen_tp_size": 2}, "replica"),
        ({"tp_size": 2, "pp_size": 2, "gen_tp_size": 2, "gen_pp_size": 1}, "replica"),
    ],
)
def test_heads_cut_through_by_few_kv_heads_are_fetched_from_the_replica(sizes, scope):
    world = sizes["tp_size"] * sizes.get("pp_size", 1) * sizes.get("dp_size", 1)
    layout = Layout(tuple(range(world)), **sizes)
    arch = arch_for(4, kv_heads=1, num_attention_heads=4, head_dim=4, **SMALL)
    have = megatron_tables(arch, layout, vocab_multiple=64)
    need = vllm_tables(arch, layout)

    plan = _plan(have, need, scopes_of(layout, layout))

    assert plan.scope == scope
    assert execute(arch, plan, have, need) == {
        rank: plan.received_bytes(rank) for rank in layout.ranks
    }


@pytest.mark.parametrize(("shard_size", "scope"), [(1, "micro_dp"), (2, "shard"), (4, "pool")])
def test_fsdp_and_zero_shards_reach_the_built_in_generator_and_vllm(shard_size, scope):
    arch = arch_for(2, **SMALL)
    layout = Layout.data_parallel((0, 1, 2, 3), shard_size=shard_size)
    scope = "shard" if shard_size == 4 else scope
    wide = Layout((0, 1, 2, 3), dp_size=4, shard_size=shard_size, gen_tp_size=2)
    have = row_tables(arch, layout)

    whole = whole_tables(arch, layout)
    plan = _plan(have, whole, scopes_of(layout, layout))
    halves = vllm_tables(arch, wide)
    over_pool = _plan(have, halves, scopes_of(wide, wide))

    assert plan.scope == scope
    assert sum(execute(arch, plan, have, whole).values()) == sum(
        plan.received_bytes(rank) for rank in layout.ranks
    )
    assert over_pool.scope == ("pool" if shard_size == 4 else "shard")
    assert bool(over_pool.buckets) == (shard_size > 1), "a whole copy needs nothing"
    execute(arch, over_pool, have, halves)
    if shard_size == 4:
        one = plan.buckets[0].messages[0]
        assert len(one.destinations) == 3, "what all lack goes out once, to all"


def test_separate_pool_gets_every_weight_and_the_load_is_spread_over_the_replicas():
    arch = arch_for(2, **SMALL)
    training = Layout(tuple(range(4)), tp_size=2, dp_size=2)
    rollout = Layout((4, 5, 6, 7), tp_size=2, dp_size=2)
    have = megatron_tables(arch, training, vocab_multiple=64)
    need = vllm_tables(arch, rollout)

    plan = _plan(have, need, scopes_of(training, rollout))
    arrived = execute(arch, plan, have, need)
    packed = {rank: sum(sent_by(b)[rank] for b in plan.buckets) for rank in training.ranks}

    held = {
        rank: 4 * sum(piece.box.size for tensor in need[rank].values() for piece in tensor.pieces)
        for rank in rollout.ranks
    }
    assert arrived == {0: 0, 1: 0, 2: 0, 3: 0} | held
    assert min(packed.values()) > 0.9 * max(packed.values()), packed


@settings(max_examples=40, deadline=None)
@given(
    bucket_bytes=st.integers(4 * 4, 4 * 3000),
    layout=st.sampled_from([each for each in nested_layouts(4) if each.size == 4]),
    few=st.booleans(),
)
def test_no_rank_packs_or_receives_more_than_a_bucket(bucket_bytes, layout, few):
    arch = arch_for(4, kv_heads=2 if few else 4, num_attention_heads=4, **SMALL)
    have = megatron_tables(arch, layout, vocab_multiple=64)
    need = vllm_tables(arch, layout)

    plan = _plan(have, need, scopes_of(layout, layout), bucket_bytes=bucket_bytes)
    whole = _plan(have, need, scopes_of(layout, layout))

    longest_row = 8 * 4  # intermediate_size floats, a row of down_proj
    limit = max(bucket_bytes, longest_row * 2)
    for rank in layout.ranks:
        assert plan.received_bytes(rank) == whole.received_bytes(rank)
        assert staging_bytes(plan, rank) <= 2 * limit
        for bucket in plan.buckets:
            assert 4 * received_by(bucket)[rank] <= limit
            assert 4 * sent_by(bucket)[rank] <= limit
    assert execute(arch, plan, have, need) == {
        rank: plan.received_bytes(rank) for rank in layout.ranks
    }


def test_same_node_sends_first_where_nodes_are_given():
    arch = arch_for(1, **SMALL)
    training = Layout((0, 4), dp_size=2)
    rollout = Layout((1, 5), dp_size=2)

    plan = _plan(
        megatron_tables(arch, training, vocab_multiple=64),
        vllm_tables(arch, rollout),
        scopes_of(training, rollout),
        node_of=lambda rank: rank // 4,
    )

    edges = {(m.source, m.destinations) for bucket in plan.buckets for m in bucket.messages}
    assert edges == {(0, (1,)), (4, (5,))}


ANY_WAY = [
    *(Layout((0, 1, 2, 3), dp_size=4, shard_size=s, gen_tp_size=g) for s in (2, 4) for g in (1, 2)),
    *(each for each in (*nested_layouts(4), *crossing_layouts(4)) if each.size == 4),
]


ANY_PLAN = {
    "layout": st.sampled_from(ANY_WAY),
    "apart": st.booleans(),
    "node_size": st.integers(1, 4),
    "bucket_bytes": st.integers(16, 12_000),
}


@settings(max_examples=12, deadline=None)
@given(**ANY_PLAN)
def test_ranks_planned_together_get_what_each_of_them_lacks_element_by_element(
    layout, apart, node_size, bucket_bytes
):
    check_what_arrives(layout, apart, node_size, bucket_bytes)


@pytest.mark.drill
@settings(max_examples=60, deadline=None)
@given(**ANY_PLAN)
def test_many_ranks_planned_together_get_what_each_of_them_lacks_element_by_element(
    layout, apart, node_size, bucket_bytes
):
    check_what_arrives(layout, apart, node_size, bucket_bytes)


def check_what_arrives(layout, apart, node_size, bucket_bytes):
    arch = arch_for(4, **SMALL)
    generation = replace(layout, ranks=(4, 5, 6, 7)) if apart else layout
    sharded = layout.shard_size > 1
    tables = row_tables if sharded else partial(megatron_tables, vocab_multiple=64)
    have = tables(arch, layout)
    need = vllm_tables(arch, generation)
    scopes = scopes_of(layout, generation)

    def node_of(rank: int) -> int:
        return rank // node_size

    plan = _plan(have, need, scopes, bucket_bytes, node_of)

    boxes = boxes_of(have), boxes_of(need)
    lacking = {
        rank: sum(
            len(elements(parts) - elements(boxes[0].get(rank, {}).get(name, ())))
            for name, parts in table.items()
        )
        for rank, table in boxes[1].items()
    }
    arrived = execute(arch, plan, have, need)
    assert {rank: arrived[rank] for rank in lacking} == {r: 4 * n for r, n in lacking.items()}
    assert check_weight_copies(Copies(plan, *boxes), label="any") == []
    for rank in plan.ranks:
        own = _plan(have, need, scopes, bucket_bytes, node_of, rank=rank)
        mine = [some for some in own.messages_of(rank) if some]
        assert plan.scope != "pool" or mine == [some for some in plan.messages_of(rank) if some]
        assert own.received_bytes(rank) == plan.received_bytes(rank)


def test_ranks_that_lack_an_element_of_the_model_are_refused():
    arch = arch_for(2, **SMALL)
    layout = Layout((0, 1), tp_size=2, gen_tp_size=1)
    have = {0: megatron_tables(arch, layout, vocab_multiple=64)[0]}

    with pytest.raises(PlanError, match=r"training ranks \[0\] that do not hold all"):
        _plan(have, vllm_tables(arch, layout), scopes_of(layout, layout))


def test_world_of_1024_is_planned_in_seconds():
    layout = Layout(
        tuple(range(1024)), tp_size=8, pp_size=4, dp_size=32, gen_tp_size=2, gen_pp_size=1
    )
    arch = arch_for(8, num_hidden_layers=32)
    have, need = _tables(arch, layout)

    plan = _plan(have, need, scopes_of(layout, layout))

    assert plan.scope == "micro_dp"
    assert len(plan.groups) == 64
