"""Plans of weights that are wrong in one place: found, and the message names the edge."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.blocks.box import Box
from spmdflow.blocks.plan import Move
from spmdflow.hybrid_engine.bucket import Bucket
from spmdflow.hybrid_engine.reshard import (
    BoxesByRank,
    Copies,
    ReshardPlan,
    boxes_of,
    generation_tables,
    plan_reshard,
    scopes_of,
    training_tables,
)
from spmdflow.parallel.layout import Layout
from spmdflow.plan.check import check_weight_copies
from tests.unit.resharding import arch_for

Case = tuple[ReshardPlan, BoxesByRank, BoxesByRank]
WAYS = {
    "shards": (Layout((0, 1, 2, 3), dp_size=4, shard_size=4), None, "fsdp"),
    "nested": (
        Layout(tuple(range(8)), tp_size=2, pp_size=2, dp_size=2, gen_tp_size=1, gen_pp_size=1),
        None,
        "megatron",
    ),
    "apart": (
        Layout((0, 1, 2, 3), tp_size=2, pp_size=2),
        Layout((4, 5, 6, 7), tp_size=2, dp_size=2, gen_tp_size=2),
        "megatron",
    ),
}


@lru_cache
def planned(way: str) -> Case:
    """The plan of a way, what ranks have and what they need."""
    training, generation, kind = WAYS[way]
    architecture = arch_for(2)
    have = boxes_of(training_tables(architecture, training, kind=kind))
    need = boxes_of(generation_tables(architecture, generation or training, engine="vllm"))
    scopes = scopes_of(training, generation or training)
    # buckets of 40 kB: tensors are cut into slabs
    plan = plan_reshard(have, need, scopes=scopes, element_bytes=2, bucket_bytes=40_000)
    return plan, have, need


def moves(plan: ReshardPlan) -> list[tuple[int, int, int]]:
    """Bucket, tensor in it, and move of every move."""
    return [
        (number, place, at)
        for number, bucket in enumerate(plan.buckets)
        for place, (_, some) in enumerate(bucket.moves)
        for at in range(len(some))
    ]


def with_move(
    plan: ReshardPlan, at: tuple[int, int, int], change: Callable[[Move], list[Move]]
) -> ReshardPlan:
    """The plan with one move of one tensor replaced by others."""
    number, place, which = at
    buckets = list(plan.buckets)
    tensors = list(buckets[number].moves)
    name, some = tensors[place]
    here = list(some)
    here[which : which + 1] = change(here[which])
    tensors[place] = (name, tuple(here))
    buckets[number] = replace(buckets[number], moves=tuple(tensors))
    return replace(plan, buckets=tuple(buckets))


def texts(case: Case, plan: ReshardPlan) -> str:
    found = check_weight_copies(Copies(plan, *case[1:]), label="actor to generator")
    return "\n".join(problem.text for problem in found)


@pytest.mark.parametrize("way", WAYS)
def test_plan_of_weights_is_proved(way: str) -> None:
    plan, have, need = planned(way)

    assert len(moves(plan)) > 2
    assert check_weight_copies(Copies(plan, have, need), label=way) == []


def drawn_edge(plan: ReshardPlan, data: st.DataObject) -> tuple[tuple[int, int, int], Move, int]:
    """Where a move stands, the move, and one of its destinations."""
    at = data.draw(st.sampled_from(moves(plan)))
    move = plan.buckets[at[0]].moves[at[1]][1][at[2]]
    return at, move, data.draw(st.sampled_from(move.destinations))


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
@pytest.mark.parametrize("way", WAYS)
def test_dropped_weight_edge_is_found(way: str, data: st.DataObject) -> None:
    plan = planned(way)[0]
    at, move, rank = drawn_edge(plan, data)
    others = tuple(other for other in move.destinations if other != rank)

    found = texts(
        planned(way),
        with_move(plan, at, lambda m: [replace(m, destinations=others)] if others else []),
    )

    named = re.findall(rf"actor to generator: edge ([\d or]+) -> {rank}: got no ", found)
    assert any(str(move.source) in sources.split(" or ") for sources in named)


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
@pytest.mark.parametrize("way", WAYS)
def test_doubled_weight_edge_is_found(way: str, data: st.DataObject) -> None:
    plan = planned(way)[0]
    at, move, rank = drawn_edge(plan, data)

    found = texts(
        planned(way),
        with_move(plan, at, lambda m: [m, replace(m, destinations=(rank,))]),
    )

    assert f"actor to generator: edge {move.source} -> {rank}: got " in found
    assert "twice, expected each element once" in found


def test_weights_from_a_rank_that_lacks_them_or_to_one_that_has_them_are_found() -> None:
    plan = planned("shards")[0]
    move = plan.buckets[0].moves[0][1][0]
    source = move.source
    rank = move.destinations[0]

    lacking = with_move(plan, (0, 0, 0), lambda m: [replace(m, source=rank)])
    there = with_move(plan, (0, 0, 0), lambda m: [m, Move(rank, m.box, (source,))])

    assert f"edge {rank} -> {rank}: got " in texts(planned("shards"), lacking)
    assert "which the source does not have" in texts(planned("shards"), lacking)
    assert f"edge {rank} -> {source}: got " in texts(planned("shards"), there)
    assert "which is there already" in texts(planned("shards"), there)


def test_box_that_is_kept_but_not_there_or_not_needed_is_found() -> None:
    plan, _, need = planned("apart")
    name = next(iter(need[4]))
    box = need[4][name][0]

    kept = replace(plan, local=((name, {4: (box,)}),))
    nothing = ("no.such", (Move(0, Box(((0, 1),)), (4,)),))
    strange = replace(plan, buckets=(*plan.buckets, Bucket((nothing,))))

    assert f"rank 4: keeps {box.bounds} of {name}" in texts(planned("apart"), kept)
    assert "which is not needed there" in texts(planned("apart"), strange)
