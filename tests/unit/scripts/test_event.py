"""Events of a placement: order, overlap, and how they compare with the sum of stages."""

from __future__ import annotations

from functools import cache

import pytest
from bench._dataflows import NOMINAL, grpo_async, ppo, safe_rlhf
from bench._event import simulate_events, step_seconds
from bench._given import evaluate
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.mapping.dataflow import Dataflow, Workload
from spmdflow.mapping.hardware import load_hardware
from spmdflow.mapping.partition_search import find_mapping
from spmdflow.mapping.placed import Placed

A100 = load_hardware("a100_80gb")
WORK = Workload(1024, 512, 512, num_updates=4)
S = NOMINAL["7B"]
PPO = ppo(S, S, reference=S, reward=S, workload=WORK)
FLOWS: dict[str, Dataflow] = {
    "ppo": PPO,
    "safe_rlhf": safe_rlhf(S, S, reference=S, reward=S, cost=S, workload=WORK),
}
LEAN = ppo(S, S, reference=S, reward=S, workload=WORK, log_prob=False)
"""All scoring is on other pools than generation, where each model has its own."""


@cache
def placements(name: str) -> list[Placed]:
    """The ten best of a dataflow on 64 GPUs."""
    return find_mapping(FLOWS[name], A100, 64, keep=10).best


def _alone() -> Placed:
    roles = ("actor", "critic", "reference", "reward")
    pools = [([role], range(16 * place, 16 * place + 16)) for place, role in enumerate(roles)]
    return evaluate(LEAN, A100, pools)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FLOWS)), st.integers(0, 9), st.sampled_from([1, 2, 5]))
def test_a_pool_runs_one_call_at_a_time_and_updates_wait_for_all_scores(
    name: str, place: int, chunks: int
) -> None:
    flow = FLOWS[name]
    placed = placements(name)[place]

    events = simulate_events(flow, placed, chunks=chunks)

    kinds = [flow.calls[event.number].kind for event in events]
    for pool in placed.pools:
        own = [event for event in events if event.model in pool.roles]
        assert all(a.end <= b.start + 1e-9 for a, b in zip(own, own[1:]))
    scored = max(event.end for event, kind in zip(events, kinds) if kind != "train")
    updates = [event.start for event, kind in zip(events, kinds) if kind == "train"]
    assert min(updates) >= scored - 1e-9
    for event, kind in zip(events, kinds):
        if kind == "infer":
            rows = [
                g.end for g, k in zip(events, kinds) if k == "generate" and g.chunk == event.chunk
            ]
            assert event.start >= max(rows) - 1e-9
    assert step_seconds(events) <= placed.seconds * (1 + 1e-9)


def test_in_one_part_the_step_takes_the_sum_of_its_stages() -> None:
    for placed in placements("ppo"):
        assert step_seconds(simulate_events(PPO, placed)) == pytest.approx(placed.seconds)


def test_pools_of_their_own_score_while_the_rest_is_generated() -> None:
    placed = _alone()

    whole = step_seconds(simulate_events(LEAN, placed, chunks=1))
    parts = simulate_events(LEAN, placed, chunks=8)

    assert step_seconds(parts) < 0.99 * whole
    generated = max(event.end for event in parts if event.call == "generate_sequences")
    assert any(e.call == "compute_reward" and e.start < generated for e in parts)


def test_a_generator_one_step_ahead_runs_beside_training() -> None:
    flow = grpo_async(S, reference=S, reward=S, workload=WORK)
    placed = find_mapping(flow, A100, 32).best[0]

    events = simulate_events(flow, placed)

    starts = {event.call: event.start for event in events}
    assert starts["generate_sequences"] == 0 == starts["compute_log_prob"]
