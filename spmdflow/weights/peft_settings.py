"""The settings in a folder of peft's format: adapter_config.json.

`PeftSettings` are those that this project computes in the same way. A file with any other is
refused. `peft_folder` reads the weights. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import read_json

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""What precedes a tensor's name in peft's files."""

_READ = {"r", "lora_alpha", "target_modules", "use_rslora", "lora_dropout", "modules_to_save"}
_WITHOUT_EFFECT = {
    "alora_invocation_tokens_offset",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""Keys that do not change what a loaded LoRA adapter computes."""
_KEEP_WEIGHTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which the base model's weights stay as they are."""


@dataclass(frozen=True)
class PeftSettings:
    """The settings of an adapter, with the names that they have in this project."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool
    dropout: float
    modules_to_save: tuple[str, ...]


def is_peft_folder(folder: str | Path) -> bool:
    """Whether a folder has an adapter in peft's format, and no model."""
    folder = Path(folder)
    return (folder / PEFT_CONFIG).is_file() and not (folder / "config.json").exists()


def read_peft_settings(key: str, folder: str | Path) -> PeftSettings:
    """Return the settings in a folder's adapter_config.json.

    ConfigError about the setting `key` if there is none, if it is not LoRA, or if it has a setting
    that this project does not compute, such as use_dora.
    """
    file = Path(folder) / PEFT_CONFIG
    if not file.is_file():
        do = f"give a folder that peft's save_pretrained wrote, with {PEFT_CONFIG}"
        raise ConfigError.of(key, f"{folder} without {PEFT_CONFIG}", "a peft folder", do)
    config = read_json(file, key=key)
    if config.get("peft_type") != "LORA":
        do = "give a folder with a LoRA adapter"
        got = f"{file} with peft_type {config.get('peft_type')}"
        raise ConfigError.of(key, got, "LORA", do)
    _refuse_other_settings(key, file, config)
    return PeftSettings(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        targets=tuple(sorted(config["target_modules"])),
        rslora=bool(config.get("use_rslora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
    )


def _refuse_other_settings(key: str, file: Path, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of peft that changes what an adapter computes."""
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets:
        got = f"{file} with target_modules {targets!r}"
        do = "write the ends of the layers' names into it, such as [q_proj, v_proj]"
        raise ConfigError.of(key, got, "a list of names", do)
    init = config.get("init_lora_weights", True)
    if init not in _KEEP_WEIGHTS:
        got = f"{file} with init_lora_weights {init!r}, which changes the weights of the base model"
        do = (
            "save it with path_initial_model_for_weight_conversion, which converts it to plain LoRA"
        )
        raise ConfigError.of(key, got, f"one of {_KEEP_WEIGHTS}", do)
    for name, value in config.items():
        is_known = name in _READ or name in _WITHOUT_EFFECT or name == "init_lora_weights"
        if is_known or not value or (name == "bias" and value == "none"):
            continue
        do = "merge this adapter into its model with peft, and give that folder as model.path"
        raise ConfigError.of(key, f"{file} with {name}={value!r}", "plain LoRA without it", do)
