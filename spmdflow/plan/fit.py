"""Fits a run into the memory of its devices: what `auto` means for engine.offload,
rollout.weights and rollout.kv_cache_gib, and the engine.options that there is memory for.

The script is traced on the ranks of the run with rows of the greatest length, and
`mapping.residency` tries what may be offloaded, pool by pool. Deterministic: every rank computes
the same from the same files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from spmdflow.config.leaf import parts_of
from spmdflow.config.resolve import Choice, Settings, has_open_cache, needs_plan, open_options
from spmdflow.config.schema import AUTO, EngineConfig, RolloutConfig
from spmdflow.errors import ConfigError, PlanError
from spmdflow.mapping.dataflow import Dataflow, Model, Strategy
from spmdflow.mapping.hardware import Hardware, load_hardware
from spmdflow.mapping.memory import pool_memory
from spmdflow.mapping.residency import Residency, Share, choose_residency, choose_weights
from spmdflow.plan.record import Trace, TracedModel
from spmdflow.plan.trace import TraceSettings, trace
from spmdflow.plan.workload import Simulated, hardware_of, nodes_of, simulate_calls

_CACHE_FRACTION = 0.9
"""Share of free memory for the KV cache if the settings say nothing."""
_SAFE = 0.3
"""Share of a device's usable memory for the KV cache of a script that cannot be planned."""


def hardware_here(name: str | None, node_size: int, world_size: int) -> Hardware:
    """As `hardware_of`; a device that no file describes counts as an A100 with its own memory."""
    try:
        return hardware_of(name, node_size, world_size=world_size)
    except ConfigError:
        if name is not None:
            raise
        size = torch.get_device_module().get_device_properties().total_memory
        like = load_hardware("a100_80gb").with_node(node_size)
        return replace(like, name="an unknown device", memory_bytes=float(size >> 30 << 30))


def fit_memory(settings: Settings) -> list[Choice]:
    """What fits into the memory of a run on this kind of node; see `find_fit`."""
    cfg = settings.cfg
    hardware = hardware_here(cfg.run.hardware, settings.node_size, settings.world_size)
    return find_fit(settings.script, cfg, settings.world_size, hardware, examples=settings.examples)


def find_fit(
    script: ModuleType,
    cfg: Any,
    world_size: int,
    hardware: Hardware,
    *,
    examples: Mapping[str, Any] | None = None,
) -> list[Choice]:
    """What a plan chooses for offload, weights, KV cache and options; cfg is left as it is.

    cfg: its placement and dtypes are resolved. If a script cannot be planned, all stays on the
    device. ConfigError if kv_cache_fraction is set then.
    """
    if not needs_plan(cfg, on_cpu=hardware.is_cpu):
        return []
    cfg = copy.deepcopy(cfg)  # the plan reads the choices made so far
    world = tuple(range(world_size))
    settings = TraceSettings(
        world, nodes_of(world, hardware), num_steps=2, examples=examples or {}, read_data=False
    )
    try:
        traced = trace(script, cfg, settings)
        step = simulate_calls(traced, traced.in_step())
    except (PlanError, ConfigError) as err:
        choices = list(_choose_without_plan(cfg, hardware, str(err).partition(";")[0]))
        return [*choices, *_keep_on_device(cfg, choices)]
    choices = list(_choose_by_plan(traced, step, cfg, hardware))
    choices += _keep_on_device(cfg, choices)
    for choice in choices:
        choice.set_in(cfg)
    for option in _choose_options(traced, dict(parts_of(cfg, EngineConfig)), hardware):
        option.set_in(cfg)
        choices.append(option)
    return choices


def _keep_on_device(cfg: Any, choices: Sequence[Choice]) -> list[Choice]:
    """Nothing is offloaded where the settings leave it open and no plan has chosen it."""
    chosen = {choice.key for choice in choices}
    others = []
    for key, engine in parts_of(cfg, EngineConfig):
        name = f"{key}.offload"
        if engine.offload is None and name not in chosen:
            others.append(Choice(name, [], "the plan knows no model of it"))
    return others


def _open_caches(cfg: Any) -> dict[str, RolloutConfig]:
    """Sections whose KV cache gets its size from the plan, by key."""
    caches = {}
    for key, rollout in parts_of(cfg, RolloutConfig):
        if has_open_cache(rollout):
            caches[key] = rollout
    return caches


def _share_of(rollout: RolloutConfig) -> Share:
    """The share of free memory that a KV cache without a size gets, and its most rows."""
    if rollout.kv_cache_fraction is None:
        return Share(_CACHE_FRACTION, rollout.max_batch_size)
    return Share(rollout.kv_cache_fraction, None)


def _choose_by_plan(
    traced: Trace, step: Simulated, cfg: Any, hardware: Hardware
) -> Iterator[Choice]:
    """Offloaded parts, weights and KV caches of every pool whose models the plan knows.

    step: the seconds and memory of one step of the traced script. cfg: the traced settings.
    """
    if step.dataflow is None:
        return
    for pool in dict.fromkeys(model.pool for model in traced.models.values()):
        models = {}
        for name in step.strategies:
            if traced.models[name].pool == pool:
                models[name] = traced.models[name]
        if models:
            yield from _fit_pool(pool, models, step, cfg, hardware)


def _fit_pool(
    pool: str, models: Mapping[str, TracedModel], step: Simulated, cfg: Any, hardware: Hardware
) -> Iterator[Choice]:
    """The choices for the models of one pool, which share the memory of its devices."""
    assert step.dataflow is not None
    engines = {}
    for key, engine in parts_of(cfg, EngineConfig):
        if engine.offload is None:
            engines[key] = engine
    caches = _open_caches(cfg)
    engine_keys = {}
    cache_keys = {}
    shares = {}
    open_models = []
    for name, model in models.items():
        engine_key = _section(engines, model, "engine")
        if engine_key:
            engine_keys[name] = engine_key
            if not model.only_generates:
                open_models.append(name)
        cache_key = _section(caches, model, "rollout") if model.generates else ""
        if cache_key:
            cache_keys[name] = cache_key
            shares[name] = _share_of(caches[cache_key])
    results = {}
    for transport in _weight_transports(models.values(), step.dataflow):
        members = _members_with(transport, models, step, step.dataflow)
        results[transport] = choose_residency(
            members, step.dataflow, hardware, open_models=open_models, shares=shares
        )
    transport = choose_weights(results)
    if transport:
        why = _transport_reason(transport, results)
        every = dict(parts_of(cfg, RolloutConfig))
        for model in models.values():
            key = _section(every, model, "rollout")
            if key:
                yield Choice(f"{key}.weights", transport, why)
    best = results[transport]
    why = _memory_reason(pool, best, hardware)
    for name, key in engine_keys.items():
        yield Choice(f"{key}.offload", list(best.parts_of(name)), why)
    for name, (size, free) in best.caches.items():
        why = _cache_reason(name, caches[cache_keys[name]], free)
        yield Choice(f"{cache_keys[name]}.kv_cache_gib", _whole_mib(size), why)


def _weight_transports(models: Iterable[TracedModel], dataflow: Dataflow) -> tuple[str, ...]:
    """Values of rollout.weights to compare if it is auto and may be blocks, otherwise ("",)."""
    for model in models:
        is_open = model.generates and not model.only_generates
        if not is_open or model.cfg.rollout.weights != AUTO:
            continue
        rollout = dataflow.model(model.name).rollout
        if rollout is not None and rollout.weights == "blocks":
            return ("blocks", "copy")
    return ("",)


def _members_with(
    transport: str, names: Iterable[str], step: Simulated, dataflow: Dataflow
) -> list[tuple[Model, Strategy]]:
    """Models of one pool and their strategies, if weights reach the generator in this way."""
    members = []
    for name in names:
        member = _with_transport(dataflow.model(name), transport)
        members.append((member, step.strategies[name]))
    return members


def _with_transport(model: Model, transport: str) -> Model:
    """The model with this value of rollout.weights, if it is one to compare.

    Layers that read the trainer's weights run outside CUDA graphs; copies need memory.
    """
    if not transport or model.rollout is None or model.rollout.weights != "blocks":
        return model
    rollout = replace(model.rollout, weights=transport, eager=transport != "copy")
    return replace(model, rollout=rollout)


def _choose_options(
    traced: Trace, engines: Mapping[str, EngineConfig], hardware: Hardware
) -> Iterator[Choice]:
    """Options that there is memory for in addition to what was chosen, model by model."""
    step = simulate_calls(traced, traced.in_step())
    if step.dataflow is None:
        return
    members = {}
    for name, strategy in step.strategies.items():
        members[name] = (step.dataflow.model(name), strategy)
    for name, (model, strategy) in list(members.items()):
        key = _section(engines, traced.models[name], "engine")
        pool = traced.models[name].pool
        if not key or not model.trained or model.engine.is_plain(strategy):
            continue
        neighbours = []
        for other in members:
            if traced.models[other].pool == pool:
                neighbours.append(other)
        for option in open_options(engines[key]):
            before = members[name]
            engine = before[0].engine
            larger = replace(model, engine=replace(engine, options=(*engine.options, option)))
            members[name] = (larger, strategy)
            phases = pool_memory([members[n] for n in neighbours], step.dataflow, hardware)
            peak = max(sum(parts.values()) for parts in phases.values())
            if peak > hardware.usable_bytes:
                members[name] = before
                continue
            usable = hardware.usable_bytes / 1e9
            why = f"pool {pool} needs {peak / 1e9:.1f} of {usable:.1f} GB with it"
            yield Choice(f"{key}.options", option, why)


def _transport_reason(transport: str, results: Mapping[str, Residency]) -> str:
    """Why one value of rollout.weights is better than the other one."""
    (other,) = (name for name in results if name != transport)
    why = f"generation and copies of a step take {results[transport].seconds:.3g} s, with {other} "
    if results[other].fits:
        return f"{why}{results[other].seconds:.3g} s"
    return f"{why}more memory than there is"


def _memory_reason(pool: str, best: Residency, hardware: Hardware) -> str:
    """What a pool needs with what was chosen for it."""
    usable = hardware.usable_bytes / 1e9
    why = f"pool {pool} then needs at most {best.peak_bytes / 1e9:.1f} of {usable:.1f} GB"
    if best.copy_seconds:
        why += f" and {best.copy_seconds:.2g} s of copies a step"
    if not best.fits:
        why += ", which does not fit"
    return why


def _cache_reason(name: str, rollout: RolloutConfig, free_bytes: float) -> str:
    """How much of the free memory a model's KV cache gets."""
    share = _share_of(rollout).of_free
    why = f"it is {share:g} of {free_bytes / 2**30:.1f} GiB that are free while {name} generates"
    if rollout.kv_cache_fraction is None:
        why += f", for {rollout.max_batch_size} rows at most"
    return why


def _choose_without_plan(cfg: Any, hardware: Hardware, cause: str) -> Iterator[Choice]:
    """A safe size for each KV cache without one. ConfigError for one that is a share of memory.

    cause: why there is no plan.
    """
    for key, rollout in _open_caches(cfg).items():
        if rollout.kv_cache_fraction is not None:
            got = f"{rollout.kv_cache_fraction} for a script without a plan ({cause})"
            where = f"{key}.kv_cache_fraction"
            do = f"set {key}.kv_cache_gib=20"
            raise ConfigError.of(where, got, "null, or a script that can be planned", do)
        why = f"it is {_SAFE:g} of a device, and there is no plan: {cause}"
        yield Choice(f"{key}.kv_cache_gib", _whole_mib(_SAFE * hardware.usable_bytes), why)


def _whole_mib(size: float) -> float:
    """A size in GiB, rounded down to whole MiB, at least one."""
    return max(int(size) >> 20, 1) / (1 << 10)


def _section(sections: Mapping[str, Any], model: TracedModel, name: str) -> str:
    """The key of a model's part of the settings; empty: it is none of these."""
    part = getattr(model.cfg, name, None)
    return next((key for key, each in sections.items() if each is part), "")
