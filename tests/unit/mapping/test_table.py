"""Strategies that models of a pool choose together, and mappings of real dataflows, tried out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from bench._dataflows import EMPTY, NOMINAL, grpo, grpo_async, llama, ppo, remax, safe_rlhf
from bench._given import evaluate, memory_floor
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmdflow.config.placement import resolve_placement
from spmdflow.errors import ConfigError
from spmdflow.mapping.dataflow import Dataflow, Strategy, Workload
from spmdflow.mapping.hardware import Hardware, load_hardware
from spmdflow.mapping.memory import pool_memory, resident_bytes, weights_at_start
from spmdflow.mapping.partition_search import find_mapping
from spmdflow.mapping.placed import Placed, Ranking, explain
from spmdflow.mapping.search import Options, model_sets
from spmdflow.mapping.seconds import total
from spmdflow.mapping.table import CostTable
from tests.unit.mapping_reference import algorithm_1, strategies

A100 = load_hardware("a100_80gb")
SMALL = llama("small", 6, 1024, 2816, 8, 8)
WORK = Workload(256, 512, 512, num_updates=4)


def _cramped(gigabytes: float, *, node: int = 4) -> Hardware:
    """Devices with so little memory that models of a pool push one another."""
    hardware = replace(A100, gpus_per_node=float(node))
    bytes_needed = gigabytes * 1e9 + A100.reserved_bytes
    return replace(hardware, memory_bytes=bytes_needed / A100.usable_memory_fraction)


def _small_ppo(*, log_prob: bool = True) -> Dataflow:
    return ppo(SMALL, SMALL, reference=SMALL, reward=SMALL, workload=WORK, log_prob=log_prob)


def _with_fixed_cache(dataflow: Dataflow, kv_cache_bytes: float) -> Dataflow:
    """The actor's rollout takes so much cache, no less and no more."""
    models = tuple(
        replace(m, rollout=replace(m.rollout, kv_cache_bytes=kv_cache_bytes)) if m.rollout else m
        for m in dataflow.models
    )
    return Dataflow(models, dataflow.calls)


def _tried_out(dataflow: Dataflow, hardware: Hardware, names: list[str], size: int) -> np.ndarray:
    """(combinations, stages): every combination of strategies of a pool that fits, simulated one
    by one through `evaluate`, which knows nothing of tables."""
    models = [dataflow.model(name) for name in names]
    calls = tuple(call for call in dataflow.calls if call.model in names)
    part = Dataflow(tuple(models), calls)
    rows = []
    for combination in itertools.product(*(strategies(m, size, hardware) for m in models)):
        chosen = dict(zip(names, combination))
        if not _fits(part, hardware, chosen):
            continue
        placed = evaluate(part, hardware, [(names, range(size))], strategies=chosen)
        stages = placed.pools[0].stage_seconds
        rows.append([stages.get(stage, 0.0) for stage in dataflow.stages])
    return np.array(rows).reshape(-1, len(dataflow.stages))


def _fits(part: Dataflow, hardware: Hardware, chosen: dict[str, Strategy]) -> bool:
    """Residents and each call's own bytes within memory, with cache for 8 sequences a replica.

    A generator with a cache of fixed size is built next to all residents, with weights of its own.
    """
    members = [(model, chosen[model.name]) for model in part.models]
    memory = pool_memory(members, part, hardware)
    resident = sum(float(total(resident_bytes(model, cut))) for model, cut in members)
    for model, cut in members:
        if model.rollout is not None and model.rollout.kv_cache_bytes is not None:
            start = float(weights_at_start(model, cut)) + model.rollout.kv_cache_bytes
            if resident + start > hardware.usable_bytes:
                return False
    for call in part.calls:
        model = part.model(call.model)
        strategy = chosen[call.model]
        parts = memory[call.title]
        used = sum(size for name, size in parts.items() if name != "kv_cache")
        if call.kind == "generate":
            replicas = strategy.num_ranks // (strategy.gen_tp * strategy.gen_pp)
            held = min(8, -(-call.workload.num_sequences // replicas))
            layers = -(-model.shape.num_layers // strategy.gen_pp)
            width = max(model.shape.kv_size / strategy.gen_tp, model.shape.head_dim)
            fixed = model.rollout.kv_cache_bytes
            used += fixed or held * 2 * layers * width * call.workload.tokens * 2
        if used > hardware.usable_bytes:
            return False
    return True


@pytest.mark.parametrize("gigabytes", [1.6, 3.0, 6.0, 60.0])
@pytest.mark.parametrize(
    ("names", "size"),
    [(("actor",), 4), (("actor", "critic"), 4), (("critic", "reference", "reward"), 4)]
    + [(("actor", "reference"), 8), (("actor", "critic", "reference"), 2)],
)
def test_front_of_a_pool_is_what_trying_every_combination_finds(
    names: tuple[str, ...], size: int, gigabytes: float
) -> None:
    _check_front(_small_ppo(), names, size, _cramped(gigabytes))


@pytest.mark.parametrize("cache", [0.2e9, 1e9, 8e9])
@pytest.mark.parametrize("gigabytes", [1.6, 3.0, 12.0])
@pytest.mark.parametrize(("names", "size"), [(("actor",), 4), (("actor", "critic"), 4)])
def test_front_beside_a_fixed_cache_is_what_trying_every_combination_finds(
    names: tuple[str, ...], size: int, gigabytes: float, cache: float
) -> None:
    _check_front(_with_fixed_cache(_small_ppo(), cache), names, size, _cramped(gigabytes))


def _check_front(dataflow: Dataflow, names: tuple[str, ...], size: int, hardware: Hardware) -> None:
    everything = _tried_out(dataflow, hardware, list(names), size)
    order = [model.name for model in dataflow.models]

    table = CostTable(dataflow, hardware, [2, 4, 8])
    front = table.front(tuple(order.index(name) for name in names), size).costs

    best = {
        tuple(row)
        for row in everything.round(9)
        if not any((o <= row).all() and (o < row).any() for o in everything.round(9))
    }
    assert (len(best) == 0) == (len(front) == 0)
    for row in front:
        assert np.isclose(everything, row).all(axis=1).any()
    for wanted in best:
        assert (front <= np.array(wanted) * (1 + 1e-9) + 1e-9).all(axis=1).any()


@pytest.mark.parametrize("gigabytes", [1.6, 3.0, 6.0, 60.0])
def test_ideal_options_are_never_above_the_exact_front(gigabytes: float) -> None:
    table = CostTable(_small_ppo(), _cramped(gigabytes), range(1, 17))

    for block in model_sets(4):
        ideal = table.ideal(block)
        bound = dict(zip(ideal.sizes.tolist(), ideal.costs))
        for size in range(1, 17):
            front = table.front(block, size)
            for vector in front.costs:
                assert size in bound, (block, size)
                assert (bound[size] <= vector * (1 + 1e-12)).all()


def _all_fronts(table: CostTable, number: int, sizes: range, unit: int) -> dict:
    found = {}
    for block in model_sets(number):
        fronts = [(size, table.front(block, size).costs) for size in sizes]
        counts = np.concatenate([np.full(len(c), size // unit) for size, c in fronts])
        found[block] = Options(counts.astype(np.int64), np.concatenate([c for _, c in fronts]))
    return found


CASES = {
    "13B": (lambda: _paper("13B", "13B"), 48, 8),
    "7B and 13B": (lambda: _paper("7B", "13B"), 40, 8),
    "34B": (lambda: _paper("34B", "34B"), 64, 8),
    "small, cramped, single ranks": (_small_ppo, 6, 1),
}
SHORT_CASES = ("7B and 13B", "small, cramped, single ranks")


def _paper(actor: str, critic: str) -> Dataflow:
    a = NOMINAL[actor]
    c = NOMINAL[critic]
    work = Workload(1024, 1024, 1024, num_updates=8)
    return ppo(a, c, reference=a, reward=c, workload=work)


@pytest.mark.parametrize(
    "name",
    [
        *SHORT_CASES,
        *(pytest.param(name, marks=pytest.mark.drill) for name in CASES if name not in SHORT_CASES),
    ],
)
def test_mapping_of_a_real_dataflow_costs_what_algorithm_1_finds(name: str) -> None:
    make, size, unit = CASES[name]
    dataflow = make()
    hardware = A100 if unit == 8 else _cramped(2.4)
    table = CostTable(dataflow, hardware, range(unit, size + 1, unit))
    options = _all_fronts(table, len(dataflow.models), range(unit, size + 1, unit), unit)

    expected = sorted(algorithm_1(options, len(dataflow.models), size // unit).values())
    found = find_mapping(dataflow, hardware, size, unit=unit, keep=10)

    assert [p.seconds for p in found.best] == pytest.approx(expected[: len(found.best)], rel=1e-9)
    assert len(found.best) == min(len(expected), 10)


FLOWS = {
    "ppo": lambda a, b, w: ppo(a, b, reference=a, reward=b, workload=w),
    "ppo without log_prob": lambda a, b, w: ppo(
        a, b, reference=a, reward=b, workload=w, log_prob=False
    ),
    "remax": lambda a, b, w: remax(a, reference=a, reward=b, workload=w),
    "grpo": lambda a, b, w: grpo(a, reference=a, reward=b, workload=w),
    "grpo_async": lambda a, b, w: grpo_async(a, reference=a, reward=b, workload=w),
    "safe_rlhf": lambda a, b, w: safe_rlhf(a, b, reference=a, reward=b, cost=b, workload=w),
    "safe_rlhf, two critics": lambda a, b, w: safe_rlhf(
        a, b, reference=a, reward=b, cost=b, cost_critic=b, workload=w
    ),
}


def _open(dataflow: Dataflow) -> Dataflow:
    """As a script's own: parts may be offloaded, and generation reads the trainer's weights."""
    models = (
        replace(
            model,
            engine=replace(model.engine, may_move=model.weights_from is None),
            rollout=model.rollout and replace(model.rollout, weights="blocks"),
        )
        for model in dataflow.models
    )
    return replace(dataflow, models=tuple(models))


def _moved(dataflow: Dataflow, moved: Mapping[str, tuple[str, ...]]) -> Dataflow:
    models = (
        replace(model, engine=replace(model.engine, moved=moved.get(model.name, ())))
        for model in dataflow.models
    )
    return replace(dataflow, models=tuple(models))


def _check_placed(placed: Placed, dataflow: Dataflow, hardware: Hardware, world: int) -> None:
    roles = [model.name for model in dataflow.models]
    pools = resolve_placement(placed.to_config(), roles, world)
    assert sorted(role for pool in pools.values() for role in pool.roles) == sorted(roles)
    for pool in placed.pools:
        assert pool.memory_bytes <= hardware.usable_bytes * (1 + 1e-9)
        for role, strategy in pool.strategies.items():
            assert strategy.num_ranks == len(pool.ranks)
            heads = dataflow.model(role).shape.num_heads
            layers = dataflow.model(role).shape
            assert heads % strategy.tp == 0 and strategy.pp <= layers.num_layers
            if strategy.gen_tp:
                assert strategy.tp % strategy.gen_tp == 0 and strategy.pp % strategy.gen_pp == 0
    slowest = [max(p.stage_seconds[stage] for p in placed.pools) for stage in dataflow.stages]
    assert placed.seconds == pytest.approx(sum(slowest))
    for pool in placed.pools:
        for stage in dataflow.stages:
            calls = [e.seconds for n, e in pool.estimates.items() if placed.calls[n].stage == stage]
            assert pool.stage_seconds[stage] == pytest.approx(sum(calls))


@settings(max_examples=25, deadline=None)
@given(
    flow=st.sampled_from(sorted(FLOWS)),
    world=st.integers(2, 24),
    gigabytes=st.sampled_from([2.0, 3.0, 8.0, 60.0]),
    wide=st.booleans(),
    moves=st.booleans(),
)
@example(flow="safe_rlhf", world=4, gigabytes=3.0, wide=True, moves=False)  # saving takes most
@example(flow="ppo", world=2, gigabytes=2.0, wide=False, moves=True)  # fits only with host memory
def test_mapping_of_any_dataflow_is_a_placement_that_fits(
    flow: str, world: int, gigabytes: float, wide: bool, moves: bool
) -> None:
    other = replace(SMALL, name="wide", hidden_size=2048, num_heads=16, num_kv_heads=4)
    dataflow = FLOWS[flow](SMALL, other if wide else SMALL, WORK)
    hardware = _cramped(gigabytes)
    if moves:
        dataflow = _open(dataflow)
    try:
        found = find_mapping(dataflow, hardware, world)
    except ConfigError as err:
        assert "expected" in str(err)
        return

    seconds = [placed.seconds for placed in found.best]
    assert seconds == sorted(seconds)
    for placed in found.best:
        _check_placed(placed, dataflow, hardware, world)
    first = found.best[0]
    pools = [(pool.roles, pool.ranks) for pool in first.pools]
    again = evaluate(dataflow, hardware, pools)
    assert again.seconds == pytest.approx(first.seconds)
    chosen = {role: s for pool in first.pools for role, s in pool.strategies.items()}
    moved = {role: parts for pool in first.pools for role, parts in pool.moved.items()}
    given_back = evaluate(_moved(dataflow, moved), hardware, pools, strategies=chosen)
    assert given_back.seconds == pytest.approx(first.seconds)


@pytest.mark.parametrize("cache", [5e9, 20e9, 40e9])
def test_placement_leaves_room_for_the_cache_that_is_set(cache: float) -> None:
    dataflow = _with_fixed_cache(_paper("13B", "13B"), cache)

    for placed in find_mapping(dataflow, A100, 16).best:
        _check_placed(placed, dataflow, A100, 16)
        pool = placed.pool_of("actor")
        members = [(dataflow.model(role), s) for role, s in pool.strategies.items()]
        parts = pool_memory(members, dataflow, A100)["actor.generate_sequences"]
        assert parts["kv_cache"] == cache
        assert sum(parts.values()) <= A100.usable_bytes


def test_cache_that_no_device_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 16 ranks"):
        find_mapping(_with_fixed_cache(_paper("13B", "13B"), 200e9), A100, 16)


def test_of_two_calls_of_one_title_the_larger_need_is_kept() -> None:
    flow = _small_ppo()
    sampled = next(call for call in flow.calls if call.kind == "generate")
    greedy = replace(sampled, workload=replace(sampled.workload, num_sequences=8))
    actor = flow.model("actor")
    strategy = Strategy(1, 1, 2, 1, 1)
    found = [
        pool_memory([(actor, strategy)], Dataflow(flow.models, calls), A100)[sampled.title]
        for calls in ((sampled,), (greedy,), (greedy, sampled), (sampled, greedy))
    ]

    assert found[1]["logits"] < found[0]["logits"]
    assert found[2] == found[3] == found[0]


def test_mapping_is_the_same_every_time() -> None:
    found = [find_mapping(_paper("13B", "70B"), A100, 64).best for _ in range(2)]

    assert found[0] == found[1]


def test_separate_rollout_pool_is_never_shared() -> None:
    dataflow = FLOWS["grpo_async"](NOMINAL["7B"], NOMINAL["7B"], Workload(512, 512, 512))

    for placed in find_mapping(dataflow, A100, 32).best:
        assert placed.pool_of("generator").roles == ("generator",)
        layouts = placed.engine_overrides()
        generator = placed.pool_of("generator").strategies["generator"]
        assert layouts["actor.rollout.layout"] == f"t{generator.gen_tp}p{generator.gen_pp}"
        assert "generator.engine.layout" not in layouts


def test_one_stage_for_all_calls_costs_the_slowest_pool() -> None:
    dataflow = FLOWS["grpo_async"](NOMINAL["7B"], NOMINAL["7B"], Workload(512, 512, 512))
    placed = find_mapping(dataflow, A100, 32).best[0]

    assert dataflow.stages == ("step",)
    assert placed.seconds == max(pool.stage_seconds["step"] for pool in placed.pools)


def test_too_small_a_world_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"got 8 ranks .* expected at least about \d+"):
        find_mapping(_paper("70B", "70B"), A100, 8)


@pytest.mark.parametrize("role", ["actor", "reference"])
def test_memory_floor_is_the_smallest_pool_that_holds_the_models(role: str) -> None:
    dataflow = _paper("34B", "34B")
    floor = memory_floor(dataflow, [role], A100)

    table = CostTable(dataflow, A100, range(1, floor + 1))
    number = [model.name for model in dataflow.models].index(role)
    fits = [size for size in range(1, floor + 1) if len(table.front((number,), size).costs)]
    assert fits == [floor]


def test_explanation_names_ratio_limit_and_a_tie() -> None:
    mapping = find_mapping(_paper("34B", "34B"), A100, 128)

    text = explain(mapping, count=5)

    assert mapping.is_tie and "a tie: " in text
    assert text.count("limit: ") == 5 and "x1.000" in text
    alone = Ranking(mapping.best[:1], 15, 128, 8, 0.0)
    assert "only " in explain(alone)


def test_a_missing_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected each of actor, critic, reference, reward once"):
        evaluate(_paper("7B", "7B"), A100, [(["actor", "critic"], range(8))])


def test_strategies_of_the_wrong_size_are_refused() -> None:
    wrong = dict.fromkeys(("actor", "critic", "reference", "reward"), Strategy(2, 1, 1, 1, 1))

    with pytest.raises(ConfigError, match="expected 8, the size of its pool"):
        evaluate(_paper("7B", "7B"), A100, [(sorted(wrong), range(8))], strategies=wrong)


def test_a_reward_function_takes_its_seconds_on_any_pool() -> None:
    flow = FLOWS["grpo"](NOMINAL["7B"], NOMINAL["7B"], Workload(512, 512, 512))
    models = tuple(replace(m, shape=EMPTY) if m.name == "reward" else m for m in flow.models)
    calls = tuple(replace(c, fixed_seconds=2.5) if c.model == "reward" else c for c in flow.calls)

    placed = find_mapping(Dataflow(models, calls), A100, 16).best[0]

    number = [call.model for call in calls].index("reward")
    assert placed.pool_of("reward").estimates[number].parts == {"fixed": 2.5}
    alone = evaluate(
        Dataflow(models, calls),
        A100,
        [(("actor", "reference"), range(8)), (("reward",), range(8, 9))],
    )
    assert alone.pools[1].stage_seconds["preparation"] == 2.5
    assert alone.pools[1].memory_bytes < 1e7


def test_model_that_uses_anothers_weights_is_placed_on_its_ranks() -> None:
    whole = _small_ppo()
    models = [replace(m, shares="actor") if m.name == "reference" else m for m in whole.models]
    found = find_mapping(Dataflow(tuple(models), whole.calls), A100, 8, keep=50)

    pools = [placed.pool_of("reference").roles for placed in found.best]
    assert pools and all("actor" in roles for roles in pools)
    apart = [placed.pool_of("reference").roles for placed in find_mapping(whole, A100, 8).best]
    assert any("actor" not in roles for roles in apart)
