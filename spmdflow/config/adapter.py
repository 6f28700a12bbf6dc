"""The adapters of a policy: what an adapter's folder says, and which settings fit together.

Reads JSON only. Called before a run starts, and again where an engine is built.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from spmdflow.config.model import LoRAConfig
from spmdflow.config.parallel import sizes_of
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind, engine_names, engines_with_adapters
from spmdflow.kind.generator import generator_kind, generators_with_adapters
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.peft_settings import read_peft_settings


def take_adapter_settings(key: str, lora: LoRAConfig, given: Collection[str]) -> None:
    """Set the values of adapter_config.json in the folder lora.adapter, in place.

    ConfigError for a setting that contradicts it: one in `given`, or one without its default.
    key: of the section, such as actor.model.lora. given: keys that a file or a word has set.
    """
    folder = lora.adapter
    assert folder is not None
    settings = read_peft_settings(f"{key}.adapter", folder)
    default = LoRAConfig()
    for field in fields(settings):
        name = field.name
        value = getattr(settings, name)
        if isinstance(value, tuple):
            value = list(value)
        own = getattr(lora, name)
        is_set = f"{key}.{name}" in given or own != getattr(default, name)
        if is_set and _comparable(own) != _comparable(value):
            expected = f"{value}, as in {folder}/adapter_config.json"
            do = f"remove {key}.{name}, or {key}.adapter"
            raise ConfigError.of(f"{key}.{name}", own, expected, do)
        setattr(lora, name, value)


def _comparable(value: Any) -> Any:
    """A value of a setting, with the items of a list in order: names of layers have none."""
    return sorted(value) if isinstance(value, list) else value


def check_adapters(role: str, part: Any) -> None:
    """Raise ConfigError if a role has adapters that its engine cannot train.

    Also if its rollout is to get adapters alone (rollout.weights=adapter) without model.lora. part:
    the role's settings (Any: its class).
    """
    lora = getattr(part.model, "lora", None)
    rollout = getattr(part, "rollout", None)
    if lora is not None:
        _check_engine(role, part.engine, lora)
        _check_rollout_of_saved_modules(role, rollout, lora)
    if rollout is not None and rollout.weights == "adapter" and lora is None:
        key = f"{role}.rollout.weights"
        got = f"adapter without {role}.model.lora"
        do = f"set {role}.rollout.weights=auto"
        raise ConfigError.of(key, got, "a policy that trains adapters", do)


def _check_engine(role: str, engine: Any, lora: LoRAConfig) -> None:
    """Raise ConfigError if an engine or its layout cannot train adapters."""
    engines = engines_with_adapters()
    key = f"{role}.model.lora"
    if engine.kind not in engines:
        got = f"adapters with {role}.engine.kind={engine.kind}"
        expected = f"an engine that trains adapters: {', '.join(engines)}"
        do = f"choose one of these, or remove {key}"
        raise ConfigError.of(key, got, expected, do)
    sizes = sizes_of(f"{role}.engine.layout", engine.layout)
    if lora.dropout and sizes.cp > 1:
        got = f"{lora.dropout:g} with {role}.engine.layout={engine.layout}"
        expected = "whole rows on each rank, whose tokens give the masks"
        do = f"remove c{sizes.cp} from the layout, or set {key}.dropout=0"
        raise ConfigError.of(f"{key}.dropout", got, expected, do)
    if engine_kind(engine.kind).cuts_model:
        check_megatron_adapters(role, pp_size=sizes.pp, options=engine.options)


def check_megatron_adapters(role: str, *, pp_size: int, options: Collection[str]) -> None:
    """Raise ConfigError if adapters cannot be trained in a layout of Megatron.

    pp_size: number of pipeline stages. options: engine.options.
    """
    key = f"{role}.model.lora"
    if pp_size > 1:
        got = f"adapters on {pp_size} pipeline stages"
        do = f"remove p{pp_size} from {role}.engine.layout, and use t or more data-parallel ranks"
        raise ConfigError.of(key, got, "one stage (t and d alone)", do)
    if "sequence_parallel" in options:
        got = f"adapters with {role}.engine.options=[sequence_parallel]"
        do = "remove sequence_parallel"
        raise ConfigError.of(key, got, "tensor-parallel ranks that have whole sequences", do)


def check_adapted_model(role: str, part: Any, arch: Architecture) -> None:
    """Raise ConfigError if a role's engine cannot train adapters of a model of this architecture.

    part: the role's settings (Any: its class). Without adapters nothing is checked.
    """
    is_adapted = getattr(part.model, "lora", None) is not None
    if is_adapted and engine_kind(part.engine.kind).cuts_model:
        sizes = sizes_of(f"{role}.engine.layout", part.engine.layout)
        check_adapted_architecture(role, arch, tp_size=sizes.tp)


def check_adapted_architecture(role: str, arch: Architecture, *, tp_size: int) -> None:
    """Raise ConfigError if Megatron's layers of a model cannot have adapters on tp_size ranks."""
    key = f"{role}.model.lora"
    if arch.num_experts:
        got = "adapters of a mixture of experts under Megatron"
        do = f"set {role}.engine.kind={engine_names()[0]}, which adapts its attention"
        raise ConfigError.of(key, got, "a dense model", do)
    if arch.num_kv_heads and arch.num_kv_heads % tp_size:
        got = f"adapters of {arch.num_kv_heads} key-value heads on {tp_size} tensor-parallel ranks"
        do = f"set {role}.engine.layout to t{math.gcd(arch.num_kv_heads, tp_size)}"
        raise ConfigError.of(key, got, "a size that divides the key-value heads", do)


def _check_rollout_of_saved_modules(role: str, rollout: Any, lora: LoRAConfig) -> None:
    """Raise ConfigError if modules to save would not reach the generator. rollout: None or its
    settings."""
    if rollout is not None and rollout.weights == "adapter" and lora.modules_to_save:
        key = f"{role}.rollout.weights"
        got = f"adapter with {role}.model.lora.modules_to_save={lora.modules_to_save}"
        do = f"set {key}=auto, which sends these modules and the merged weights"
        raise ConfigError.of(key, got, "adapters alone, as vLLM has no room for others", do)


def check_adapter_sync(role: str, part: Any) -> None:
    """Raise ConfigError if rollout.weights=adapter with a generator that knows no adapters.

    part: settings of a role that generates (Any: its class).
    """
    rollout = part.rollout
    if rollout.weights == "adapter" and not generator_kind(rollout.generator).adapters:
        key = f"{role}.rollout.weights"
        got = f"adapter with {role}.rollout.engine={rollout.generator}"
        expected = f"a generator that computes with them: {', '.join(generators_with_adapters())}"
        do = f"set {role}.rollout.weights=auto, which merges them into the weights"
        raise ConfigError.of(key, got, expected, do)


def check_shares(cfg: Any, pools: Sequence[Sequence[str]]) -> None:
    """Raise ConfigError unless the actor with its adapters off can serve as the reference.

    That needs actor.model.lora without modules to save, one model path for both, a pool that has
    both roles, and a reference engine that divides rows as the actor's does: of a kind that trains
    adapters and, if either divides the model, of the actor's kind and layout.
    cfg: the script's settings; pools: the roles of each pool.
    """
    actor = cfg.actor
    reference = cfg.reference
    key = "reference.shares"
    do = "remove reference.shares"
    if getattr(actor.model, "lora", None) is None:
        got = "actor without actor.model.lora"
        raise ConfigError.of(key, got, "an actor whose own weights stay as they are", do)
    if actor.model.lora.modules_to_save:
        got = f"actor with actor.model.lora.modules_to_save={actor.model.lora.modules_to_save}"
        expected = "an actor whose own weights stay as they are"
        raise ConfigError.of(key, got, expected, f"remove modules_to_save, or {do}")
    if reference.model.path != actor.model.path:
        got = f"actor of {actor.model.path} for a reference of {reference.model.path}"
        raise ConfigError.of(key, got, "one model", f"set one path, or {do}")
    if not any({"actor", "reference"} <= set(roles) for roles in pools):
        got = "actor on other ranks"
        expected = "both on the same ranks"
        raise ConfigError.of(key, got, expected, f"put both into one pool, or {do}")
    if reference.engine.kind not in engines_with_adapters():
        got = f"actor with reference.engine.kind={reference.engine.kind}"
        expected = "rows divided as the actor's are"
        raise ConfigError.of(key, got, expected, "remove reference.engine.kind")
    of_reference = f"{reference.engine.kind} {reference.engine.layout}"
    of_actor = f"{actor.engine.kind} {actor.engine.layout}"
    cuts = any(engine_kind(part.engine.kind).cuts_model for part in (actor, reference))
    if cuts and of_reference != of_actor:
        got = f"actor on {of_actor} with reference.engine {of_reference}"
        do = f"set reference.engine.kind={actor.engine.kind} and "
        do += f"reference.engine.layout={actor.engine.layout}"
        raise ConfigError.of(key, got, "rows divided as the actor's are", do)
