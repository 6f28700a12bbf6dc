"""What the settings of a run become before it starts: six passes over them, in order.

Each pass takes `Settings` and returns new ones with the reasons for what it chose. It leaves its
argument as it is.

| pass | what it decides |
|---|---|
| device_defaults | `auto` values that follow from the device, installed packages or the loss |
| resume | the same values, pools and layouts, as the run had them whose checkpoint is resumed |
| template_date | the date that chat templates show, if they ask for it |
| placement | pools and layouts if placement=auto, by the planner's search |
| memory | what is offloaded, the KV cache and options that memory allows, by the planner |
| check | nothing: it raises ConfigError for settings that cannot work |

| setting | on CPU | elsewhere |
|---|---|---|
| dtype | float32 | bfloat16 |
| rollout.engine | built-in | the first whose package is installed, otherwise built-in |
| rollout.kv_cache_gib, engine.offload | 64 MiB, nothing | pass memory |
| engine.options | as set | adds overlap, and what pass memory has room for |

Knows no torch and no planner: `program.prepare` fills in the facts of `Settings`. `check_open`, in
config.check, finds most errors before these facts are known.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdflow.config import check as checks
from spmdflow.config.leaf import flat, follow, parts_of, value_text
from spmdflow.config.objective import PolicyLossConfig
from spmdflow.config.schema import (
    AUTO,
    CPU_CACHE_BYTES,
    DTYPES,
    DataSettings,
    EngineConfig,
    FrozenEngineConfig,
    Precise,
    RolloutConfig,
)
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.generator import generator_kind, generator_names

_RESUMED = ("dtype", "engine", "aggregation")
"""Settings that a resumed run keeps if they are `auto`, besides its placement."""


@dataclass(frozen=True)
class Choice:
    """A value that was chosen for a setting, and the reason."""

    key: str
    value: Any
    """Of the setting's type. For engine.options: one option to add to the list."""
    why: str
    """Continues "because ..."."""

    def set_in(self, cfg: Any) -> None:
        """Set the value in a settings object, in place.

        A key that ends in .options appends the value to that list, unless it is in it already.
        """
        section, _, name = self.key.rpartition(".")
        part = attrgetter(section)(cfg) if section else cfg
        if name == "options":
            part.options = list(dict.fromkeys([*part.options, self.value]))
        else:
            setattr(part, name, copy.copy(self.value))

    def replaces(self, other: Choice) -> bool:
        """Whether the other choice has no effect any more after this one."""
        return self.key == other.key and not self.key.endswith(".options")


@dataclass(frozen=True)
class PreviousRun:
    """The run whose checkpoint is resumed."""

    settings: Mapping[str, Any]
    """All of them, in nested maps."""
    num_ranks: int


@dataclass(frozen=True)
class Settings:
    """The settings of a run, and the facts that `auto` depends on."""

    cfg: Any
    """An object of the script's settings class. No pass changes it; it is replaced."""
    script: ModuleType
    world_size: int
    node_size: int
    """Ranks of one node."""
    device: str
    """Type of the device, such as cpu or cuda."""
    search_placement: Planner
    """The planner's answer for placement=auto."""
    fit_memory: Planner
    """The planner's answer for what depends on memory."""
    examples: Mapping[str, Any] = field(default_factory=dict)
    """The section `assume`: examples of values that only a run knows, for the planner."""
    previous: PreviousRun | None = None
    written: Any = None
    """The settings before the first pass; `resolve` fills it in."""

    def with_choices(self, choices: Iterable[Choice]) -> Settings:
        """Return new settings with a deep copy of cfg in which these choices are set, in order."""
        cfg = copy.deepcopy(self.cfg)
        for choice in choices:
            choice.set_in(cfg)
        follow(cfg)
        return replace(self, cfg=cfg)


Planner = Callable[[Settings], list[Choice]]
"""Traces the script, changes nothing; ConfigError if nothing fits."""
Pass = Callable[[Settings], tuple[Settings, list[Choice]]]


def resolve(settings: Settings) -> tuple[Settings, list[Choice]]:
    """Apply every pass of `PASSES` in order; return the final settings and the reasons.

    A choice that a later pass replaces is not among the reasons. ConfigError for settings that
    cannot work.
    """
    settings = replace(settings, written=settings.cfg)
    reasons: list[Choice] = []
    for apply in PASSES:
        settings, choices = apply(settings)
        for choice in choices:
            reasons = [earlier for earlier in reasons if not choice.replaces(earlier)]
            reasons.append(choice)
    return settings, reasons


def device_defaults(settings: Settings) -> tuple[Settings, list[Choice]]:
    """Pass 1: replace `auto` where the device type, installed packages or the loss decide."""
    choices = choose_device_defaults(settings.cfg, settings.device)
    return settings.with_choices(choices), choices


def resume(settings: Settings) -> tuple[Settings, list[Choice]]:
    """Pass 2: give values that were written as `auto` those of the run that is resumed.

    These are dtype, rollout engine and loss aggregation. With placement=auto its pools and layouts
    are taken too, unless ranks or engines differ. Without a resumed run nothing changes.
    """
    if settings.previous is None:
        return settings, []
    choices = []
    why = "the checkpoint's run had it"
    before = flat(dict(settings.previous.settings))
    written = dict(parts_of(settings.written, object))
    for section, part in parts_of(settings.cfg, object):
        for name in _RESUMED:
            value = before.get(f"{section}.{name}", AUTO)
            is_open = getattr(written[section], name, None) == AUTO
            if is_open and value not in (AUTO, getattr(part, name)):
                choices.append(Choice(f"{section}.{name}", value, why))
    settings = settings.with_choices(choices)
    if _is_placement_open(settings.cfg) and not _differences(settings):
        pools = _previous_placement(settings, why)
        choices += pools
        settings = settings.with_choices(pools)
    return settings, choices


def template_date(settings: Settings) -> tuple[Settings, list[Choice]]:
    """Pass 3: replace `auto` as the date of chat templates that ask for today's.

    It becomes the date that the resumed run had, otherwise today's in UTC. Commands carry rank 0's
    settings, so all ranks render with rank 0's date.
    """
    before = flat(dict(settings.previous.settings)) if settings.previous else {}
    choices = []
    for section, data in parts_of(settings.cfg, DataSettings):
        if data.chat_template_date != AUTO or not _shows_date(Path(data.tokenizer_path)):
            continue
        key = f"{section}.chat_template_date"
        day = before.get(key, AUTO)
        why = "the checkpoint's run had it"
        if day == AUTO:
            day = datetime.now(UTC).date().isoformat()
            why = "the chat template shows the date"
        choices.append(Choice(key, day, why))
    return settings.with_choices(choices), choices


def placement(settings: Settings) -> tuple[Settings, list[Choice]]:
    """Pass 4: replace placement=auto by the pools and layouts that the planner finds.

    Does nothing if the placement is set. If a resumed run's placement did not apply, the reasons
    say why not.
    """
    if not _is_placement_open(settings.cfg):
        return settings, []
    choices = settings.search_placement(settings)
    differences = _differences(settings)
    if differences:
        note = f"; the checkpoint's run had {', '.join(differences)}"
        choices = [replace(choice, why=choice.why + note) for choice in choices]
    return settings.with_choices(choices), choices


def memory(settings: Settings) -> tuple[Settings, list[Choice]]:
    """Pass 5: let the planner choose what depends on memory: offloading, KV caches, options.

    Does nothing if no such setting is open (`needs_plan`).
    """
    if not needs_plan(settings.cfg, on_cpu=settings.device == "cpu"):
        return settings, []
    choices = settings.fit_memory(settings)
    return settings.with_choices(choices), choices


def check(settings: Settings) -> tuple[Settings, list[Choice]]:
    """Refuse settings that cannot work: one ConfigError for all errors."""
    checks.check(settings.cfg, settings.world_size)
    return settings, []


PASSES: tuple[Pass, ...] = (device_defaults, resume, template_date, placement, memory, check)


def choose_device_defaults(cfg: Any, device: str, *, here: bool = True) -> list[Choice]:
    """Return what `auto` means on a device type (such as cuda), without changing cfg.

    It covers dtypes, rollout engines, loss aggregations, on CPU the KV cache and offloading,
    elsewhere engine options.
    here: only choose rollout engines whose package is installed on this node.
    """
    choices = []
    on_cpu = device == "cpu"
    why = f"the device is {device}"
    for key, part in parts_of(cfg, Precise):
        if part.dtype == AUTO:
            choices.append(_choose_dtype(cfg, f"{key}.dtype", device))
    for key, rollout in parts_of(cfg, RolloutConfig):
        engine = rollout.engine
        if engine == AUTO:
            engine = generator_names()[0] if on_cpu else _first_installed_generator(here)
            choices.append(Choice(f"{key}.engine", engine, why))
        is_open = rollout.kv_cache_gib is None and rollout.kv_cache_fraction is None
        if on_cpu and is_open and generator_kind(engine).fixed_cache:
            choices.append(Choice(f"{key}.kv_cache_gib", CPU_CACHE_BYTES / (1 << 30), why))
    for key, loss in parts_of(cfg, PolicyLossConfig):
        if loss.aggregation == AUTO:
            why_mean = f"the surrogate is {loss.surrogate}"
            choices.append(Choice(f"{key}.aggregation", loss.chosen_aggregation, why_mean))
    for key, engines in parts_of(cfg, EngineConfig):
        if on_cpu and engines.offload is None:
            choices.append(Choice(f"{key}.offload", [], why))
        if not on_cpu and not isinstance(engines, FrozenEngineConfig):
            for name in engine_kind(engines.kind).chosen_options("device", engines.options):
                choices.append(Choice(f"{key}.options", name, why))
    return choices


_TODAY = b"strftime_now"
"""The function of transformers that gives chat templates the date."""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def _shows_date(tokenizer: Path) -> bool:
    """Whether the chat template in a tokenizer's folder asks for today's date."""
    for name in _TEMPLATE_FILES:
        file = tokenizer / name
        if file.is_file() and _TODAY in file.read_bytes():
            return True
    return False


_LIKE_ACTOR = ("actor.rollout.dtype", "reference.model.dtype")
"""Settings that follow actor.model.dtype on a CPU: the models are compared with the actor."""


def _choose_dtype(cfg: Any, key: str, device: str) -> Choice:
    """Return the precision of a model whose dtype is auto."""
    if device != "cpu":
        return Choice(key, DTYPES[2], f"the device is {device}")
    actor = getattr(cfg, "actor", None)
    dtype = getattr(getattr(actor, "model", None), "dtype", AUTO)
    if key in _LIKE_ACTOR and dtype != AUTO:
        return Choice(key, dtype, f"actor.model.dtype is {dtype}")
    return Choice(key, DTYPES[1], "the device is cpu")


def _first_installed_generator(here: bool) -> str:
    """Return the first generator in the order of registration whose package is installed.

    If there is none, return the built-in generator. here: False takes every package for installed.
    """
    for name in generator_names():
        package = generator_kind(name).package
        if package and (not here or importlib.util.find_spec(package) is not None):
            return name
    return generator_names()[0]


def _is_placement_open(cfg: Any) -> bool:
    """Whether the planner has to find the pools."""
    return getattr(cfg, "placement", None) == AUTO


def _differences(settings: Settings) -> list[str]:
    """Return why the pools and layouts of the resumed run do not apply, one phrase per reason.

    A different number of ranks, other engines, or a run without a placement. Empty if they apply or
    no run is resumed.
    """
    if settings.previous is None:
        return []
    differences = []
    num_ranks = settings.previous.num_ranks
    if num_ranks != settings.world_size:
        differences.append(f"{num_ranks} ranks, now {settings.world_size}")
    before = settings.previous.settings
    for key, part, name in _engines_of(settings.cfg):
        earlier = _section_of(before, key).get(name)
        if earlier != getattr(part, name):
            differences.append(f"{key}.{name}={earlier}, now {getattr(part, name)}")
    if not differences and before.get("placement") in (None, AUTO):
        differences.append("no placement")
    return differences


def _previous_placement(settings: Settings, why: str) -> list[Choice]:
    """Return choices that repeat the pools, layouts and engine options of the resumed run.

    A layout is repeated where the settings have its default; options are repeated, one choice each,
    where the settings have no other options.
    """
    assert settings.previous is not None
    before = settings.previous.settings
    choices = [Choice("placement", before["placement"], why)]
    for key, part, _ in _engines_of(settings.cfg):
        earlier = _section_of(before, key)
        if part.layout == type(part).layout:
            choices.append(Choice(f"{key}.layout", earlier["layout"], why))
        options = earlier.get("options", [])
        if isinstance(part, EngineConfig) and set(part.options) <= set(options):
            for option in options:
                if option not in part.options:
                    choices.append(Choice(f"{key}.options", option, why))
    return choices


def _engines_of(cfg: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, section, name of the setting that chooses its engine) of each engine section.

    Trainers come first, with the setting "kind", then rollouts, with the setting "engine".
    """
    for key, engine in parts_of(cfg, EngineConfig):
        yield key, engine, "kind"
    for key, rollout in parts_of(cfg, RolloutConfig):
        yield key, rollout, "engine"


def _section_of(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the section at a dotted key of nested settings; {} if there is none."""
    section: Any = settings
    for name in key.split("."):
        section = section.get(name) if isinstance(section, Mapping) else None
    if isinstance(section, Mapping):
        return section
    return {}


def needs_plan(cfg: Any, *, on_cpu: bool = True) -> bool:
    """Return whether a plan must choose something that depends on memory.

    That is what is offloaded, the size of a KV cache or, unless on CPU, how weights reach a
    generator that can share the trainer's memory.
    """
    for _, engine in parts_of(cfg, EngineConfig):
        if engine.offload is None:
            return True
    for _, rollout in parts_of(cfg, RolloutConfig):
        can_share = generator_kind(rollout.generator).fixed_cache
        if has_open_cache(rollout) or (not on_cpu and rollout.weights == AUTO and can_share):
            return True
    return False


def open_options(engine: EngineConfig) -> tuple[str, ...]:
    """Engine options that a plan adds if there is memory for them."""
    if isinstance(engine, FrozenEngineConfig):
        return ()
    return engine_kind(engine.kind).chosen_options("memory", engine.options)


def has_open_cache(rollout: RolloutConfig) -> bool:
    """Whether the generator has a KV cache of fixed size whose bytes are not set."""
    return rollout.kv_cache_gib is None and generator_kind(rollout.generator).fixed_cache


def choices_text(choices: Sequence[Choice]) -> str:
    """Return one line per reason: "auto   NAME: VALUE (SECTIONS), ..., because REASON".

    Equal values of several sections are listed once, with the sections. In order of first
    appearance.
    """
    lines: dict[str, dict[str, list[str]]] = {}
    for choice in choices:
        section, _, name = choice.key.rpartition(".")
        value = f"{name}: {_choice_text(choice)}"
        lines.setdefault(choice.why, {}).setdefault(value, []).append(section)
    texts = []
    for why, values in lines.items():
        words = []
        for value, sections in values.items():
            words.append(f"{value} ({', '.join(sections)})" if any(sections) else value)
        texts.append(f"auto   {', '.join(words)}, because {why}")
    return "\n".join(texts)


def _choice_text(choice: Choice) -> str:
    """Return a chosen value on one line; a placement as {actor, critic}@8 | {reward}@8.

    The number behind @ is the pool's number of ranks.
    """
    if choice.key != "placement" or not isinstance(choice.value, Mapping):
        return value_text(choice.value)
    pools = []
    for pool in choice.value.values():
        pools.append(f"{{{', '.join(pool['roles'])}}}@{len(pool['ranks'])}")
    return " | ".join(pools)
