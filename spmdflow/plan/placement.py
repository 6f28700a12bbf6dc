"""placement=auto: the search of `mapping` on what the script itself does (paper Algorithms 1, 2).

The script is traced once on two ranks, which shows its models and calls. The search finds pools,
layouts and generation sizes for the world. Sizes that the settings leave at their default (t1 of
megatron, auto of vllm) are searched, others are kept. A reward function has no weights and so no
simulator: it joins the pool that is least busy in the stage in which rewards are computed.

Deterministic: every rank computes the same from the same files. Data files are not read.
"""

from __future__ import annotations

import copy
import math
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import yaml

from spmdflow.config.leaf import parts_of
from spmdflow.config.parallel import sizes_of
from spmdflow.config.placement import has_engine, roles_of
from spmdflow.config.resolve import Choice, Settings
from spmdflow.config.schema import EngineConfig, RolloutConfig
from spmdflow.errors import ConfigError, PlanError
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.generator import generator_kind
from spmdflow.mapping.dataflow import Dataflow, Model
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.partition_search import find_mapping
from spmdflow.mapping.placed import Placed, Ranking, explain, reason
from spmdflow.plan.record import Trace
from spmdflow.plan.text import WIDTH, wrap_paragraph
from spmdflow.plan.trace import TraceSettings, trace
from spmdflow.plan.workload import hardware_of, simulate_calls

_SCORING = "preparation"
_ALL_ROWS = 1 << 30


@dataclass(frozen=True)
class PlacementSearch:
    """What the search for a placement has decided, and how it ranks the alternatives."""

    cfg: Any
    """The script's settings, with pools and layouts (Any: its own dataclass)."""
    mapping: Ranking
    choices: tuple[Choice, ...]
    """Settings that the search decided."""

    @property
    def changed(self) -> dict[str, Any]:
        """Return the new value of each setting that the search decided, by dotted key.

        For engine.options, this is the whole list.
        """
        engines = dict(parts_of(self.cfg, EngineConfig))
        changed: dict[str, Any] = {}
        for choice in self.choices:
            section, _, name = choice.key.rpartition(".")
            if name == "options":
                changed[choice.key] = engines[section].options
            else:
                changed[choice.key] = choice.value
        return changed


def search_placement(settings: Settings) -> list[Choice]:
    """Return the settings of the fastest placement on this kind of node; see `find_placement`."""
    world_size = settings.world_size
    hardware = hardware_of(settings.cfg.run.hardware, settings.node_size, world_size=world_size)
    search = find_placement(
        settings.script, settings.cfg, world_size, hardware, examples=settings.examples
    )
    return list(search.choices)


def find_placement(
    script: ModuleType,
    cfg: Any,
    world_size: int,
    hardware: Hardware,
    *,
    examples: Mapping[str, Any] | None = None,
) -> PlacementSearch:
    """Return the fastest placement of a script, with pools, layouts and recomputation.

    Raises ConfigError if none fits, if no model of the script has weights, or if the script cannot
    be planned. cfg is left as it is; the result has a changed copy (Any: an object of the script's
    settings class).
    examples: see `TraceSettings.examples`.
    """
    mapping = find_mapping(dataflow_of(script, cfg, examples or {}), hardware, world_size)
    best = mapping.best[0]
    why = f"it is the fastest by prediction, {best.seconds:.4g} s a step"
    choices = [Choice("placement", _placement(cfg, best), why)]
    for key, text in best.engine_overrides().items():
        choices += _override(cfg, key, text, why)
    placed = copy.deepcopy(cfg)
    for choice in choices:
        choice.set_in(placed)
    return PlacementSearch(placed, mapping, tuple(choices))


def dataflow_of(script: ModuleType, cfg: Any, examples: Mapping[str, Any]) -> Dataflow:
    """Return the models and calls of one step of a script, with searchable sizes left open.

    A separate generator may not share a pool with any other model. Raises ConfigError if the script
    spawns a model with an engine besides its roles, if the sizes of a model with weights are
    unknown, or if no model has weights.
    """
    traced = _trace_on_two_ranks(script, cfg, examples)
    roles = roles_of(cfg)
    others = []
    for n, model in traced.models.items():
        if n not in roles and has_engine(model.cfg):
            others.append(n)
    if others:
        raise ConfigError(
            f"placement: got auto for a script with {', '.join(others)} besides its roles, "
            f"expected one model of each of {', '.join(roles)}, as a placement says where a role "
            f"lives; set placement=colocate or pools of your own"
        )
    known = simulate_calls(traced, traced.in_step())
    weights = []
    for name in known.without:
        weights.append(getattr(traced.models[name].settings, "model", None))
    if known.dataflow is None or any(model is not None for model in weights):
        raise ConfigError(
            f"placement: got auto, but the sizes of {', '.join(known.without)} are not known "
            f"({'; '.join(known.without.values())}), expected a model folder with config.json for "
            f"each that has weights, and at least one; correct model.path or set placement=colocate"
        )
    models = tuple(_open(model, cfg) for model in known.dataflow.models)
    pairs = tuple(
        (generator, model.name)
        for _, generator in traced.links
        for model in models
        if model.name != generator
    )
    return Dataflow(models, known.dataflow.calls, pairs)


def _trace_on_two_ranks(script: ModuleType, cfg: Any, examples: Mapping[str, Any]) -> Trace:
    """Return a dry run of two steps on two ranks of one node, with every layout at its default.

    Models are colocated, or split if the script has a separate generator. Raises ConfigError if the
    script cannot be planned. cfg is left as it is.
    """
    small = copy.deepcopy(cfg)
    apart = "generator" in getattr(cfg, "more_roles", ())
    small.placement = "split" if apart else "colocate"
    for _, engine in parts_of(small, EngineConfig):
        engine.layout = EngineConfig.layout
    for _, rollout in parts_of(small, RolloutConfig):
        rollout.layout = RolloutConfig.layout
    settings = TraceSettings((0, 1), (0, 0), num_steps=2, examples=examples, read_data=False)
    try:
        return trace(script, small, settings)
    except PlanError as err:
        raise ConfigError(
            f"placement: got auto, but the script cannot be traced: {err}; expected a script that "
            f"a plan can follow; declare what it waits for, or set placement=colocate"
        ) from err


def _open(model: Model, cfg: Any) -> Model:
    """Return the model with the sizes that the user set, and None for sizes that may be searched.

    A layout may be searched if it is at its default and the engine (or generator) divides models.
    Parts may be offloaded if engine.offload is None. A generator whose KV cache grows with its rows
    gets no fixed cache, but must decode max_batch_size rows at once (all, if not set).
    """
    part = getattr(cfg, model.name, None) or cfg.actor
    engine = model.engine
    rollout = model.rollout
    if engine.facts.cuts_model and hasattr(cfg, model.name):
        key = f"{model.name}.engine.layout"
        engine = replace(engine, layout=_sizes(key, part.engine.layout, EngineConfig.layout))
    if hasattr(cfg, model.name):
        sizes = sizes_of(f"{model.name}.engine.layout", part.engine.layout)
        is_open = part.engine.layout == EngineConfig.layout
        engine = replace(
            engine,
            shard_size=sizes.shard,
            virtual_size=sizes.virtual,
            context_size=0 if is_open and not _has_dropout(part) else sizes.cp,
            expert_size=0 if is_open else sizes.ep,
            may_move=part.engine.offload is None,
        )
    if rollout is not None and not rollout.facts.fixed_cache:
        every = rollout.max_batch_size or _ALL_ROWS  # of a replica: it depends on its ranks
        rollout = replace(rollout, kv_cache_bytes=None, min_batch_size=every)
    if rollout is not None and rollout.facts.cuts_model:
        cut = _sizes("actor.rollout.layout", part.rollout.layout, RolloutConfig.layout)
        rollout = replace(rollout, layout=cut)
        if not hasattr(cfg, model.name):  # a separate generator has its generation layout
            engine = replace(engine, layout=cut)
    return replace(model, engine=engine, rollout=rollout)


def _has_dropout(part: Any) -> bool:
    """Whether a role drops inputs of adapters, which needs whole rows. part: its settings."""
    lora = getattr(part.model, "lora", None)
    return lora is not None and lora.dropout > 0


def _sizes(key: str, text: str, default: str) -> tuple[int, int] | None:
    """The sizes that a layout names, None where it is the setting's default."""
    if text == default:
        return None
    return sizes_of(key, text)[:2]


def _placement(cfg: Any, best: Placed) -> dict[str, Any]:
    """Return the value of the setting `placement`: pool name -> roles and ranks.

    A pool is named by its roles, such as actor+critic. A role without a simulator joins the pool
    that is least busy in the preparation stage, or in the whole step if the script has one stage.
    Of equally busy pools it joins the one with the lowest ranks.
    """
    if _SCORING in best.stage_seconds:
        stages = [_SCORING]
    else:
        stages = list(best.stage_seconds)
    pools = {}
    for name, pool in best.to_config().items():
        pools[name] = dict(pool)
    placed = set()
    for pool in pools.values():
        for role in pool["roles"]:
            placed.add(role)
    for role in (role for role in roles_of(cfg) if role not in placed):
        busy = []
        for placed_pool in best.pools:
            busy.append(sum(placed_pool.stage_seconds.get(at, 0.0) for at in stages))
        idle = min(zip(busy, best.pools, strict=True), key=lambda p: (p[0], p[1].ranks))[1]
        pools["+".join(idle.roles)]["roles"].append(role)
    result = {}
    for pool in pools.values():
        result["+".join(pool["roles"])] = pool
    return result


def _override(cfg: Any, key: str, text: str, why: str) -> list[Choice]:
    """Return the choices that set one size that the search found, under the script's own key.

    A role without settings of its own (a separate generator) uses those of the actor, and only its
    rollout.layout. [] if the setting must not change: the engine or generator does not divide
    models, or the user's layout has virtual stages, which the search does not set.
    key, text: of `Placed.engine_overrides`.
    """
    role, _, name = key.partition(".")
    if not hasattr(cfg, role):  # a separate generator has the actor's settings, no engine
        if name != "rollout.layout":
            return []
        role = "actor"
    part = getattr(cfg, role)
    key = f"{role}.{name}"
    if name == "engine.options":
        return [Choice(key, option, why) for option in yaml.safe_load(text)]
    if name == "engine.layout":
        has_virtual_parts = sizes_of(key, part.engine.layout).virtual > 1  # the search sets none
        wanted = sizes_of(key, text)
        is_divided = wanted.ep > 1 or wanted.cp > 1
        if has_virtual_parts or not (engine_kind(part.engine.kind).cuts_model or is_divided):
            return []
    if name == "rollout.layout" and not generator_kind(part.rollout.generator).cuts_model:
        return []
    return [Choice(key, text, why)]


COUNT = 10
_EACH_LINE = "each line: the best sizes and layouts for one way to share the models out into pools"


def search_text(search: PlacementSearch) -> str:
    """Return the ten best placements as text, then the settings that give the first one."""
    lines = ["placement=auto", "", f"  {_EACH_LINE}"]
    for line in explain(search.mapping, count=COUNT).splitlines():
        lines += wrap_paragraph("  " + line, "", colon="") if line.strip() else [""]
    lines += ["", "  the first as settings of a command line:", "", *settings_text(search)]
    return "\n".join(lines) + "\n\n"


def settings_text(search: PlacementSearch) -> list[str]:
    """Return lines with the changed settings, quoted for a shell, to append to a command.

    Every setting except the last is followed by a backslash. Long settings are wrapped at 100
    columns. Lists of ranks are written in full.
    """
    lines: list[str] = []
    for key, value in search.changed.items():
        style = {"default_flow_style": True, "sort_keys": False, "width": math.inf}
        if isinstance(value, str):
            text = value
        else:
            text = yaml.safe_dump(value, **style).strip()
        lines += textwrap.wrap(
            shlex.quote(f"{key}={text}"),
            WIDTH - len(" \\"),
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines[-1] += " \\"
    lines[-1] = lines[-1].removesuffix(" \\")
    return lines


def search_plain(search: PlacementSearch) -> dict[str, Any]:
    """The same as data."""
    mapping = search.mapping
    best = search.mapping.best[0]
    return {
        "partitions": mapping.num_partitions,
        "is_tie": mapping.is_tie,
        "seconds_searched": mapping.seconds_searched,
        "settings": dict(search.changed),
        "best": [
            {
                "seconds": placed.seconds,
                "ratio": placed.seconds / best.seconds,
                "pools": placed.to_config(),
                "layouts": placed.engine_overrides(),
                "offloaded": {
                    role: list(parts) for pool in placed.pools for role, parts in pool.moved.items()
                },
                "stage_seconds": dict(placed.stage_seconds),
                "limit": list(placed.limit),
                "why": "" if placed is best else reason(placed, best),
            }
            for placed in mapping.best[:COUNT]
        ],
    }
