"""What the plan chooses for `auto`: engine.residency, rollout.weights, rollout.kv_cache; and
engine.options that there is memory for.

The script is traced on the ranks of the run with rows of the greatest length, and
`mapping.residency` tries what may be offloaded, pool by pool. Deterministic: every rank finds the
same from the same files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from spmdflow.config.auto import Choice, has_open_cache, needs_plan, open_options
from spmdflow.config.leaf import cache_of, parts_of
from spmdflow.config.schema import AUTO, EngineConfig, RolloutConfig
from spmdflow.errors import ConfigError, PlanError
from spmdflow.mapping.dataflow import Dataflow, Model
from spmdflow.mapping.hardware import Hardware, load_hardware
from spmdflow.mapping.memory import pool_memory
from spmdflow.mapping.residency import Residency, Share, choose_residency, choose_weights
from spmdflow.plan.record import Trace, TracedModel
from spmdflow.plan.trace import TraceSettings, trace
from spmdflow.plan.workload import Simulated, hardware_of, nodes_of, simulate_orders

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


def choose_by_plan(
    script: ModuleType,
    cfg: Any,
    world_size: int,
    hardware: Hardware,
    *,
    examples: Mapping[str, Any] | None = None,
) -> list[Choice]:
    """Write the choices of residency, weights, KV cache and options into cfg; returns them.

    cfg: its placement and dtypes are resolved. If a script cannot be planned, all stays on the
    device. ConfigError if a kv_cache is then a share of free memory.
    """
    if not needs_plan(cfg, on_cpu=hardware.is_cpu):
        return []
    every = dict(parts_of(cfg, EngineConfig))
    engines = {}
    for key, part in every.items():
        if part.residency == AUTO:
            engines[key] = part
    caches = {}
    for key, rollout in parts_of(cfg, RolloutConfig):
        if has_open_cache(rollout):
            caches[key] = rollout
    sections = dict(parts_of(cfg, object))

    def write(found: Iterable[Choice]) -> list[Choice]:
        made = list(found)
        for choice in made:
            choice.write(sections[choice.key.rpartition(".")[0]])
        return made

    world = tuple(range(world_size))
    settings = TraceSettings(
        world, nodes_of(world, hardware), num_steps=2, examples=examples or {}, read_data=False
    )
    traced = None
    try:
        traced = trace(script, cfg, settings)
        step = simulate_orders(traced, traced.in_step())
    except (PlanError, ConfigError) as err:
        made = write(_choose_without_plan(caches, hardware, str(err).partition(";")[0]))
    else:
        rollouts = dict(parts_of(cfg, RolloutConfig))
        made = write(_choose_by_plan(traced, step, engines, caches, rollouts, hardware))
    told = {choice.key for choice in made}
    kept = []
    for key in engines:
        if f"{key}.residency" not in told:
            kept.append(key)
    made += write(
        Choice(f"{key}.residency", "keep", "no model that the plan knows") for key in kept
    )
    if traced is None:
        return made
    return made + write(_roomy(traced, every, hardware))


def _share_of(rollout: RolloutConfig) -> Share:
    """The share of a kv_cache setting that is not a size: auto, or a fraction of free memory."""
    size, unit = cache_of(rollout.kv_cache)
    return Share(size, rollout.max_batch_size if unit == AUTO else None)


def _choose_by_plan(
    traced: Trace,
    step: Simulated,
    engines: Mapping[str, EngineConfig],
    caches: Mapping[str, RolloutConfig],
    every: Mapping[str, RolloutConfig],
    hardware: Hardware,
) -> Iterator[Choice]:
    for pool in dict.fromkeys(model.pool for model in traced.models.values()):
        models = {}
        for n in step.strategies:
            if traced.models[n].pool == pool:
                models[n] = traced.models[n]
        if step.dataflow is None or not models:
            continue
        trainers = {}
        for n, m in models.items():
            trainers[n] = _section(engines, m, "engine")
        rollouts = {}
        for n, m in models.items():
            if m.generates:
                rollouts[n] = _section(caches, m, "rollout")
        ways = {
            way: choose_residency(
                [(_with_way(step.dataflow.model(n), way), step.strategies[n]) for n in models],
                step.dataflow,
                hardware,
                open_models=[n for n, k in trainers.items() if k and not models[n].only_generates],
                shares={name: _share_of(caches[key]) for name, key in rollouts.items() if key},
            )
            for way in _ways(models.values(), step.dataflow)
        }
        found = ways[way := choose_weights(ways)]
        if way:
            other = next(name for name in ways if name != way)
            why = f"generation and copies of a step take {ways[way].seconds:.3g} s, with {other} "
            why += (
                f"{ways[other].seconds:.3g} s" if ways[other].fits else "more memory than there is"
            )
            keys = (_section(every, model, "rollout") for model in models.values())
            yield from (Choice(f"{key}.weights", way, why) for key in keys if key)
        why = _why(pool, found, hardware)
        for name in (name for name, key in trainers.items() if key):
            moved = ", ".join(found.parts_of(name)) or "keep"
            yield Choice(f"{trainers[name]}.residency", moved, why)
        for name, (size, free) in found.caches.items():
            rollout = caches[rollouts[name]]
            key = f"{rollouts[name]}.kv_cache"
            limit = f", for {rollout.max_batch_size} rows at most" * (rollout.kv_cache == AUTO)
            why = f"{_share_of(rollout).of_free:g} of {free / 2**30:.1f} GiB"
            why += f" that are free while {name} generates{limit}"
            yield Choice(key, f"{max(int(size) >> 20, 1)} MiB", why)


def _ways(models: Iterable[TracedModel], dataflow: Dataflow) -> tuple[str, ...]:
    """Values of rollout.weights to compare, if it is auto and may be blocks; else none ("")."""
    found = (dataflow.model(m.name).rollout for m in models if m.generates and _leaves_open(m))
    if any(r and r.weights == "blocks" for r in found):
        return ("blocks", "copy")
    return ("",)


def _leaves_open(model: TracedModel) -> bool:
    return bool(model.cfg.rollout.weights == AUTO) and not model.only_generates


def _with_way(model: Model, way: str) -> Model:
    """Layers that read the trainer's weights run outside CUDA graphs; copies need memory."""
    if not way or model.rollout is None or model.rollout.weights != "blocks":
        return model
    return replace(model, rollout=replace(model.rollout, weights=way, eager=way != "copy"))


def _roomy(
    traced: Trace, engines: Mapping[str, EngineConfig], hardware: Hardware
) -> Iterator[Choice]:
    """Options that there is memory for beside what was chosen, model by model."""
    step = simulate_orders(traced, traced.in_step())
    if step.dataflow is None:
        return
    found = {}
    for name, cut in step.strategies.items():
        found[name] = (step.dataflow.model(name), cut)
    for name, (model, cut) in list(found.items()):
        key = _section(engines, traced.models[name], "engine")
        pool = traced.models[name].pool
        if not key or not model.trained or model.engine.is_plain(cut):
            continue
        members = []
        for n in found:
            if traced.models[n].pool == pool:
                members.append(n)
        for option in open_options(engines[key]):
            options = (*model.engine.options, option)
            found[name] = replace(model, engine=replace(model.engine, options=options)), cut
            phases = pool_memory([found[n] for n in members], step.dataflow, hardware)
            peak = max(sum(parts.values()) for parts in phases.values())
            if peak > hardware.usable_bytes:
                found[name] = model, cut
                continue
            why = f"pool {pool}, {peak / 1e9:.1f} of {hardware.usable_bytes / 1e9:.1f} GB with it"
            yield Choice(f"{key}.options", option, why)


def _why(pool: str, found: Residency, hardware: Hardware) -> str:
    peak = f"{found.peak_bytes / 1e9:.1f} of {hardware.usable_bytes / 1e9:.1f} GB at the peak"
    if found.copy_seconds:
        copies = f", {found.copy_seconds:.2g} s of copies a step"
    else:
        copies = ""
    return f"pool {pool}, {peak}{copies}{'' if found.fits else ', which does not fit'}"


def _choose_without_plan(
    caches: Mapping[str, RolloutConfig], hardware: Hardware, why: str
) -> Iterator[Choice]:
    for key, rollout in caches.items():
        if rollout.kv_cache != AUTO:
            got = f"{rollout.kv_cache} for a script without a plan ({why})"
            do = "set '20 GiB'"
            raise ConfigError.of(f"{key}.kv_cache", got, "a size, or a script that plans", do)
        size = int(_SAFE * hardware.usable_bytes) >> 20
        yield Choice(f"{key}.kv_cache", f"{size} MiB", f"{_SAFE:g} of a device, no plan: {why}")


def _section(sections: Mapping[str, Any], model: TracedModel, name: str) -> str:
    """The key of a model's part of the settings; empty: it is none of these."""
    part = getattr(model.cfg, name, None)
    return next((key for key, each in sections.items() if each is part), "")
