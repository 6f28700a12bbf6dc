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
    """Return `hardware_of(...)`, or a substitute for a device that no file describes.

    The substitute is an A100 with the device's own memory, rounded down to whole GiB. A `name` that
    is not known raises ConfigError.
    """
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
    """Return what a plan chooses for offload, weights, KV cache and options; cfg is left as it is.

    [] if the settings leave nothing open. The script is traced for two steps with rows of the
    greatest length. Options come last, as they use the memory that the other choices leave. If a
    script cannot be planned, nothing is offloaded and each KV cache gets a safe size; ConfigError
    if kv_cache_fraction is set then.
    cfg: its placement and dtypes are resolved.
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
    """Return a choice `offload=[]` for each engine with offload=None that has no choice yet.

    choices: those made by a plan.
    """
    chosen = {choice.key for choice in choices}
    others = []
    for key, engine in parts_of(cfg, EngineConfig):
        name = f"{key}.offload"
        if engine.offload is None and name not in chosen:
            others.append(Choice(name, [], "the plan knows no model of it"))
    return others


def _open_caches(cfg: Any) -> dict[str, RolloutConfig]:
    """Return the rollout sections whose KV cache has a fixed, unset size, by dotted key."""
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
    """Yield choices of offloaded parts, weights and KV caches, pool by pool.

    Only models that can be simulated count; if there are none, nothing is chosen.
    step: the models and calls of one step of the traced script. cfg: the traced settings.
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
    """Yield the choices for the models of one pool, which share the memory of its devices.

    First rollout.weights, if it is auto and both blocks and copy are possible: the one with the
    faster step. Then engine.offload where it is None, and kv_cache_gib of each open cache, by the
    best residency (`choose_residency`). If nothing fits, the choices with the lowest peak are
    yielded.
    """
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
    """Return the values of rollout.weights to compare: ("blocks", "copy"), or ("",) for none.

    They are compared if a model that trains and generates has rollout.weights=auto and blocks are
    possible.
    """
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
    """Return (model, strategy) of each name, with rollout.weights=transport where it is open."""
    members = []
    for name in names:
        member = _with_transport(dataflow.model(name), transport)
        members.append((member, step.strategies[name]))
    return members


def _with_transport(model: Model, transport: str) -> Model:
    """Return the model with rollout.weights=transport, if its rollout has blocks.

    Any other model is returned as it is, as for an empty transport. With blocks, layers read the
    trainer's weights and run outside CUDA graphs (eager). Copies need memory.
    """
    if not transport or model.rollout is None or model.rollout.weights != "blocks":
        return model
    rollout = replace(model.rollout, weights=transport, eager=transport != "copy")
    return replace(model, rollout=rollout)


def _choose_options(
    traced: Trace, engines: Mapping[str, EngineConfig], hardware: Hardware
) -> Iterator[Choice]:
    """Yield each engine option that there is memory for, in addition to what was chosen before.

    Options are tried one after another, model by model, and kept if the peak of the pool's phases
    stays within the usable memory. Models that are not trained, or that are plain modules on one
    rank, get none.
    engines: engine sections by key, with the earlier choices.
    """
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
    """Return why one value of rollout.weights is better: its seconds and the other's.

    If the other value does not fit, the text says so instead.
    """
    (other,) = (name for name in results if name != transport)
    why = f"generation and copies of a step take {results[transport].seconds:.3g} s, with {other} "
    if results[other].fits:
        return f"{why}{results[other].seconds:.3g} s"
    return f"{why}more memory than there is"


def _memory_reason(pool: str, best: Residency, hardware: Hardware) -> str:
    """Return what a pool needs with its choices: peak memory, copies, whether it fits."""
    usable = hardware.usable_bytes / 1e9
    why = f"pool {pool} then needs at most {best.peak_bytes / 1e9:.1f} of {usable:.1f} GB"
    if best.copy_seconds:
        why += f" and {best.copy_seconds:.2g} s of copies a step"
    if not best.fits:
        why += (
            ", which does not fit: lower engine.micro_batch_tokens, "
            "set engine.options=[recompute] or use more ranks"
        )
    return why


def _cache_reason(name: str, rollout: RolloutConfig, free_bytes: float) -> str:
    """Return how much of the free memory a model's KV cache gets, and for how many rows at most.

    The rows are given only if kv_cache_fraction is not set.
    """
    share = _share_of(rollout).of_free
    why = f"it is {share:g} of {free_bytes / 2**30:.1f} GiB that are free while {name} generates"
    if rollout.kv_cache_fraction is None:
        why += f", for {rollout.max_batch_size} rows at most"
    return why


def _choose_without_plan(cfg: Any, hardware: Hardware, cause: str) -> Iterator[Choice]:
    """Yield a size for each KV cache without one: 0.3 of a device's usable memory.

    Raises ConfigError if kv_cache_fraction is set. cause: why there is no plan.
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
