"""Which weights a model has, in which precision, and what of a policy is trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spmdflow.config.leaf import setting
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engines_with_adapters
from spmdflow.kind.generator import generator_kind, generators_with_adapters
from spmdflow.weights.adapter import Adapters, adapter_scale
from spmdflow.weights.peft_settings import read_peft_settings

AUTO = "auto"
DTYPES = (AUTO, "float32", "bfloat16")


class Precise:
    """A part of the settings that has a dtype."""

    dtype: str
    max_model_len: int | None = None
    """Of a generator: tokens of prompt and response together; None: as the settings say."""

    @property
    def precision(self) -> str:
        """dtype, or float32 while it is auto (before a run or a plan has chosen)."""
        if self.dtype == AUTO:
            return DTYPES[1]
        return self.dtype


@dataclass
class ModelConfig(Precise):
    """Which weights, in which precision."""

    path: str = setting(
        "Hugging Face folder, owner/name[@revision] on the hub, or a RUN_DIR or checkpoint."
    )
    dtype: str = setting(
        "Compute precision; gradients and optimizer stay float32. On a CPU bfloat16 is that of "
        "matrix products. auto: bfloat16 on CUDA, float32 on CPU, for a reference the actor's.",
        AUTO,
        one_of=DTYPES,
    )


@dataclass
class LoRAConfig:
    """Adapters: y = W x + scale B A x; only A and B are trained (Hu et al. 2021)."""

    rank: int = setting("Rows of A and columns of B.", 16, at_least=1)
    alpha: float = setting(
        "Adapters are scaled by alpha / rank, with rslora by alpha / sqrt(rank).", 32.0, above=0
    )
    targets: list[str] = setting(
        "Linear layers that get one, by the ends of their names, such as q_proj; all-linear: all "
        "those of the decoder's layers.",
        ["all-linear"],
    )
    adapter: str | None = setting(
        "Start from this adapter: a folder in peft's format, a name on the hub, or a RUN_DIR or "
        "checkpoint with adapters. Its files give the values of all other settings of this section.",
        None,
    )
    rslora: bool = setting("Scale adapters by alpha / sqrt(rank) (Kalajdzievski 2023).", False)
    dropout: float = setting(
        "Probability that an element of an adapter's input is dropped in updates. "
        "Log-probabilities and generation are without dropout.",
        0.0,
        at_least=0,
        below=1,
    )
    modules_to_save: list[str] = setting(
        "Modules that are trained whole next to the adapters, by the ends of their names, such as "
        "lm_head or embed_tokens.",
        [],
    )

    @property
    def adapters(self) -> Adapters:
        """Which weights have them, and which are trained whole."""
        return Adapters(self.rank, tuple(self.targets), tuple(self.modules_to_save))

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return adapter_scale(self.rank, self.alpha, rslora=self.rslora)


@dataclass
class PolicyModelConfig(ModelConfig):
    """A model that is trained, whole or by adapters."""

    lora: LoRAConfig | None = setting(
        "Train adapters of this rank and leave the weights as they are.", None
    )


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
    engines = engines_with_adapters()
    if lora is not None and part.engine.kind not in engines:
        got = f"adapters with {role}.engine.kind={part.engine.kind}"
        expected = f"an engine that trains adapters: {', '.join(engines)}"
        do = f"choose one of these, or remove {role}.model.lora"
        raise ConfigError.of(f"{role}.model.lora", got, expected, do)
    if rollout is not None and rollout.weights == "adapter" and lora is None:
        key = f"{role}.rollout.weights"
        got = f"adapter without {role}.model.lora"
        do = f"set {role}.rollout.weights=auto"
        raise ConfigError.of(key, got, "a policy that trains adapters", do)


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

    That needs actor.model.lora, one model path for both, a pool that has both roles, and a
    reference engine of a kind that trains adapters.
    cfg: the script's settings; pools: the roles of each pool.
    """
    actor = cfg.actor
    reference = cfg.reference
    key = "reference.shares"
    do = "remove reference.shares"
    if getattr(actor.model, "lora", None) is None:
        got = "actor without actor.model.lora"
        raise ConfigError.of(key, got, "an actor whose own weights stay as they are", do)
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
