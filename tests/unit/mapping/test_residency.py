"""What moves to the host: the choice against every combination, tried out one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
from bench._dataflows import llama, ppo
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmdflow.mapping.dataflow import Dataflow, Model, Strategy, Workload
from spmdflow.mapping.hardware import Hardware, load_hardware
from spmdflow.mapping.memory import pool_memory
from spmdflow.mapping.placed import call_seconds, place_pool
from spmdflow.mapping.residency import Share, choose_residency
from spmdflow.mapping.table import CostTable
from tests.unit.mapping_reference import strategies

A100 = load_hardware("a100_80gb")
SMALL = llama("small", 6, 1024, 2816, 8, 8)
FLOW = ppo(
    SMALL, SMALL, reference=SMALL, reward=SMALL, workload=Workload(256, 512, 512, num_updates=4)
)
PARTS = ("parameters", "gradients", "optimizer")
CUT = Strategy(2, 1, 2, 1, 1)
Moved = Mapping[str, tuple[str, ...]]


def cramped(gigabytes: float) -> Hardware:
    memory = (gigabytes * 1e9 + A100.reserved_bytes) / A100.usable_memory_fraction
    return replace(A100, gpus_per_node=4.0, memory_bytes=memory)


def flow(cache: float | None) -> Dataflow:
    models = (
        replace(m, rollout=replace(m.rollout, kv_cache_bytes=cache, weights="copy"))
        if m.rollout
        else m
        for m in FLOW.models
    )
    return Dataflow(tuple(models), FLOW.calls)


def members(dataflow: Dataflow, moved: Moved) -> list[tuple[Model, Strategy]]:
    return [
        (
            replace(m, engine=replace(m.engine, moved=moved.get(m.name, ()))),
            CUT if m.rollout else replace(CUT, gen_tp=0, gen_pp=0),
        )
        for m in dataflow.models
    ]


def every(dataflow: Dataflow) -> Iterator[Moved]:
    """All subsets of all parts, gradients apart."""
    some = [(m.name, PARTS if m.trained else PARTS[:1]) for m in dataflow.models]
    subsets = [
        [one for n in range(len(parts) + 1) for one in itertools.combinations(parts, n)]
        for _, parts in some
    ]
    for chosen in itertools.product(*subsets):
        yield dict(zip([name for name, _ in some], chosen))


def fits_and_seconds(
    dataflow: Dataflow, moved: Moved, hardware: Hardware, share: float | None
) -> tuple[bool, float]:
    """Whether every phase fits, and the seconds of all calls: by the plan's own simulators."""
    held = members(dataflow, moved)
    phases = pool_memory(held, dataflow, hardware)
    pool = {model.name: (model, cut) for model, cut in held}
    fits = True
    seconds = 0.0
    for call in dataflow.calls:
        cache = phases[call.title].get("kv_cache", 0.0)
        if call.kind == "generate" and share is not None:
            cache = phases[call.title]["kv_cache"] = share * cache
        model, cut = pool[call.model]
        least = 8 * 2 * 6 * 1024 * 1024 * 2  # sequences, k and v, layers, width, tokens, bytes
        if call.kind == "generate" and share is not None and cache < least:
            return False, 0.0
        seconds += call_seconds(call, model, cut, hardware, kv_bytes=cache).seconds
    peak = max(sum(parts.values()) for parts in phases.values())
    return fits and peak <= hardware.usable_bytes, seconds


@settings(max_examples=6, deadline=None)
@given(
    gigabytes=st.floats(0.4, 8.0),
    rule=st.sampled_from([(None, 0.9), (None, 0.5), (0.5e9, None), (2e9, None)]),
)
def test_what_moves_fits_if_anything_does_and_nothing_that_fits_is_faster(
    gigabytes: float, rule: tuple[float | None, float | None]
) -> None:
    cache, share = rule
    hardware = cramped(gigabytes)
    dataflow = flow(cache)
    names = [model.name for model in dataflow.models]

    found = choose_residency(
        members(dataflow, {}),
        dataflow,
        hardware,
        open_models=names,
        shares={} if share is None else {"actor": Share(share)},
    )

    tried = [fits_and_seconds(dataflow, moved, hardware, share) for moved in every(dataflow)]
    fitting = [seconds for fits, seconds in tried if fits]
    moved = {name: found.parts_of(name) for name in names}
    fits, seconds = fits_and_seconds(dataflow, moved, hardware, share)
    assert found.fits == fits == bool(fitting)
    if fitting:
        assert seconds <= min(fitting) * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(gigabytes=st.floats(0.4, 4.0), names=st.sampled_from([("actor", "critic"), ("actor",)]))
@example(gigabytes=1.5, names=("actor", "critic"))
def test_search_keeps_a_front_that_fits_and_else_finds_what_plans_of_all_strategies_do(
    gigabytes: float, names: tuple[str, ...]
) -> None:
    hardware = cramped(gigabytes)
    whole = flow(None)
    calls = tuple(call for call in whole.calls if call.model in names)
    kept = Dataflow(tuple(map(whole.model, names)), calls)
    moving = (replace(m, engine=replace(m.engine, may_move=True)) for m in kept.models)
    opened = Dataflow(tuple(moving), calls)
    block = tuple(range(len(names)))

    before, found = (
        CostTable(each, hardware, [2]).front(block, 2, alone=True) for each in (kept, opened)
    )

    if len(before.costs):
        assert all(map(np.array_equal, vars(before).values(), vars(found).values()))
        return
    seconds = []
    for cuts in itertools.product(*(strategies(model, 2, hardware) for model in kept.models)):
        pool = list(zip(kept.models, cuts))
        plan = choose_residency(
            pool, kept, hardware, open_models=names, shares={"actor": Share(1.0)}
        )
        if plan.fits:
            placed = [
                (replace(m, engine=replace(m.engine, moved=plan.parts_of(m.name))), cut)
                for m, cut in pool
            ]
            seconds.append(sum(place_pool(kept, hardware, placed, range(2)).stage_seconds.values()))
    assert found.costs[:, 0].tolist() == pytest.approx(sorted(seconds)[:1])


def test_nothing_moves_where_all_fits_and_a_cache_is_no_larger_than_its_rows() -> None:
    dataflow = flow(None)

    found = choose_residency(
        members(dataflow, {}),
        dataflow,
        A100,
        open_models=[model.name for model in dataflow.models],
        shares={"actor": Share(0.9, most_rows=64)},
    )

    size, free = found.caches["actor"]
    per_row = 2 * 6 * 1024 * 1024 * 2  # k and v, layers, width, tokens, bytes
    assert found.fits and found.moved == () and found.copy_seconds == 0
    assert 64 * per_row <= size <= 64 * per_row * 1.02 < 0.9 * free


def test_weights_that_generation_shares_stay_on_the_device() -> None:
    own = flow(0.1e9)
    shared = FLOW
    names = [model.name for model in FLOW.models]
    moved = {}
    for title, dataflow in (("own", own), ("shared", shared)):
        found = choose_residency(
            members(dataflow, {}), dataflow, cramped(1.4), open_models=names, shares={}
        )
        moved[title] = found.parts_of("actor")

    assert "parameters" in moved["own"]
    assert "parameters" not in moved["shared"] and "optimizer" in moved["shared"]


@given(
    offloaded=st.sets(
        st.sampled_from(
            [(name, part) for name in ("actor", "critic", "reference") for part in PARTS]
        )
    ),
    kept=st.booleans(),
)
def test_no_start_of_a_model_needs_more_than_its_calls(
    offloaded: set[tuple[str, str]], kept: bool
) -> None:
    dataflow = FLOW if kept else flow(0.1e9)
    moved = {
        model.name: tuple(part for part in PARTS if (model.name, part) in offloaded)
        for model in dataflow.models
    }

    phases = pool_memory(members(dataflow, moved), dataflow, A100)

    for model in dataflow.models:
        start = sum(phases[f"{model.name}.build"].values())
        calls = [
            sum(phases[call.title].values()) for call in dataflow.calls if call.model == model.name
        ]
        assert 0 < start <= max(calls)


@pytest.mark.parametrize("weights", ["copy", "flat", "blocks"])
def test_generator_that_shares_weights_has_its_own_too_until_it_is_built(weights: str) -> None:
    """And its cache leaves room for them: it is allocated before they are freed."""
    dataflow = flow(None)
    models = {model.name: model for model in dataflow.models}
    rollout = replace(models["actor"].rollout, weights=weights)
    models["actor"] = replace(models["actor"], rollout=rollout)
    dataflow = Dataflow(tuple(models.values()), dataflow.calls)
    hardware = cramped(3.0)

    found = choose_residency(
        members(dataflow, {}),
        dataflow,
        hardware,
        open_models=[],
        shares={"actor": Share(1.0)},
    )
    size, _ = found.caches["actor"]
    sized = replace(rollout, kv_cache_bytes=size)
    models["actor"] = replace(models["actor"], rollout=sized)
    planned = Dataflow(tuple(models.values()), dataflow.calls)
    phases = pool_memory(members(planned, {}), planned, hardware)

    whole = SMALL.num_parameters * 2  # bfloat16, one generation rank
    start = phases["actor.build"]
    assert start["generation_weights"] == (whole if weights == "copy" else 1.5 * whole)
    assert found.fits and start["kv_cache"] == size > 0.1e9
    assert max(sum(phase.values()) for phase in phases.values()) <= hardware.usable_bytes
