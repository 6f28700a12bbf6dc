"""Builds the generator that a rollout section names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import Generator
from spmdflow.rollout.vllm import VllmGenerator

_GENERATORS: dict[str, Callable[[RolloutConfig, str, torch.device], Generator]] = {
    "builtin": BuiltinGenerator,
    "vllm": VllmGenerator,
}
_DTYPES = ("float32", "bfloat16")


def generator_of(cfg: RolloutConfig, model_path: str, device: torch.device) -> Generator:
    """The generator `cfg.engine` on this rank alone, with the weights of model_path.

    Its weights_version is NEVER: a sync must come before the first generation. It takes no
    seed, as responses depend on the seeds of their rows only.
    """
    for name, value, known in (
        ("engine", cfg.engine, tuple(_GENERATORS)),
        ("dtype", cfg.dtype, _DTYPES),
    ):
        if value not in known:
            raise ConfigError(
                f"rollout.{name}: got {value!r}, expected one of {', '.join(known)}; "
                f"choose one of them"
            )
    return _GENERATORS[cfg.engine](cfg, model_path, device)
