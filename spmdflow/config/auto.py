"""What `auto` means for a device type, before a plan has looked at memory.

| setting | on CPU | elsewhere |
|---|---|---|
| dtype | float32 | bfloat16 |
| rollout.engine | built-in | the first whose package is installed, else built-in |
| rollout.kv_cache, engine.residency | 64 MiB, keep | the plan decides (plan.residency) |
| engine.options | as set | adds overlap, and what the plan has memory for |

loss.aggregation depends on loss.surrogate alone. A run that resumes keeps the dtypes, the rollout
engine and the aggregation that it began with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdflow.config.leaf import cache_of, parts_of
from spmdflow.config.objective import PolicyLossConfig
from spmdflow.config.schema import (
    AUTO,
    DTYPES,
    EngineConfig,
    FrozenEngineConfig,
    Precise,
    RolloutConfig,
)
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.generator import generator_kind, generator_names


@dataclass(frozen=True)
class Choice:
    """A value that was chosen for a setting, and why."""

    key: str
    value: str
    """For engine.options: one option to add to the list."""
    why: str

    def write(self, section: Any) -> None:
        """Set the value in `section`, the part of the settings that the key belongs to."""
        name = self.key.rpartition(".")[2]
        value = [*section.options, self.value] if name == "options" else self.value
        setattr(section, name, value)


def choose_by_device(
    cfg: Any, device: str, *, here: bool = True, kept: Mapping[str, Any] | None = None
) -> list[Choice]:
    """Replace `auto` in cfg by what it means on a device type, such as cuda; returns the choices.

    here: only choose packages that are installed here. kept: settings by key of the resumed run.
    """
    made = list(_choices(cfg, device, here))
    for number, choice in enumerate(made):
        section, _, name = choice.key.rpartition(".")
        before = (kept or {}).get(choice.key, AUTO)
        if name in ("dtype", "engine", "aggregation") and before not in (AUTO, choice.value):
            made[number] = Choice(choice.key, before, "as the checkpoint's run had it")
        made[number].write(dict(parts_of(cfg, object))[section])
    return made


def _choices(cfg: Any, device: str, here: bool) -> Iterator[Choice]:
    on_cpu = device == "cpu"
    why = f"on {device}"
    for key, part in parts_of(cfg, Precise):
        if part.dtype == AUTO:
            yield Choice(f"{key}.dtype", DTYPES[1 if on_cpu else 2], why)
    for key, rollout in parts_of(cfg, RolloutConfig):
        engine = rollout.engine
        if engine == AUTO:
            engine = generator_names()[0] if on_cpu else _first_installed_generator(here)
            yield Choice(f"{key}.engine", engine, why)
        if on_cpu and rollout.kv_cache == AUTO and generator_kind(engine).fixed_cache:
            yield Choice(f"{key}.kv_cache", "64 MiB", why)
    for key, loss in parts_of(cfg, PolicyLossConfig):
        if loss.aggregation == AUTO:
            why_mean = f"for surrogate {loss.surrogate}"
            yield Choice(f"{key}.aggregation", loss.chosen_aggregation, why_mean)
    for key, engines in parts_of(cfg, EngineConfig):
        if on_cpu and engines.residency == AUTO:
            yield Choice(f"{key}.residency", "keep", why)
        if not on_cpu and not isinstance(engines, FrozenEngineConfig):
            for name in engine_kind(engines.kind).chosen_options("device", engines.options):
                yield Choice(f"{key}.options", name, why)


def _first_installed_generator(here: bool) -> str:
    """The first generator with a package of its own that can be imported; else the built-in one."""
    packages = {}
    for name in generator_names():
        packages[name] = generator_kind(name).package
    found = (
        name
        for name, package in packages.items()
        if package and (not here or importlib.util.find_spec(package) is not None)
    )
    return next(found, generator_names()[0])


def needs_plan(cfg: Any, *, on_cpu: bool = True) -> bool:
    """Whether a plan must decide what moves to the host, the size of a KV cache or, unless on CPU,
    how weights reach a generator that can share the trainer's memory."""
    return any(part.residency == AUTO for _, part in parts_of(cfg, EngineConfig)) or any(
        has_open_cache(part)
        or (not on_cpu and part.weights == AUTO and generator_kind(part.generator).fixed_cache)
        for _, part in parts_of(cfg, RolloutConfig)
    )


def open_options(engine: EngineConfig) -> tuple[str, ...]:
    """Engine options that a plan adds if there is memory for them."""
    if isinstance(engine, FrozenEngineConfig):
        return ()
    return engine_kind(engine.kind).chosen_options("memory", engine.options)


def has_open_cache(rollout: RolloutConfig) -> bool:
    """Whether the generator has a KV cache of fixed size whose bytes are not set."""
    is_open = cache_of(rollout.kv_cache)[1] != "bytes"
    return is_open and generator_kind(rollout.generator).fixed_cache


def choices_text(choices: Sequence[Choice]) -> str:
    """A line for each reason: the chosen values, and the sections that they are for."""
    lines: dict[str, dict[str, list[str]]] = {}
    for choice in choices:
        section, _, name = choice.key.rpartition(".")
        lines.setdefault(choice.why, {}).setdefault(f"{name}={choice.value}", []).append(section)
    texts = {}
    for why, values in lines.items():
        texts[why] = ", ".join(f"{value} ({', '.join(at)})" for value, at in values.items())
    return "\n".join(f"auto   {why}: {text}" for why, text in texts.items())
