"""Builds the generator that a rollout section names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import Generator
from spmdflow.rollout.replica import Replica
from spmdflow.rollout.vllm import VllmGenerator

_DTYPES = ("float32", "bfloat16")


def generator_of(
    cfg: RolloutConfig, model_path: str, device: torch.device, replica: Replica | None = None
) -> Generator:
    """This rank's part of the generator `cfg.engine`, with the weights of model_path.

    replica: the ranks that generate together and their groups; none: this rank alone. All of its
    ranks build the generator together. Its weights_version is NEVER: a sync must come before the
    first generation. It takes no seed, as responses depend on the seeds of their rows only.
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
    return _GENERATORS[cfg.engine](cfg, model_path, device, replica or Replica.alone())


def _builtin(
    cfg: RolloutConfig, model_path: str, device: torch.device, replica: Replica
) -> Generator:
    if replica.size > 1:
        raise ConfigError(
            f"rollout.engine=builtin: got generation replicas of {replica.size} ranks "
            f"(t{replica.tp_size}p{replica.pp_size}), expected 1, as it decodes on single ranks; "
            f"set actor.rollout.layout=t1 or actor.rollout.engine=vllm"
        )
    return BuiltinGenerator(cfg, model_path, device)


_GENERATORS: dict[str, Callable[[RolloutConfig, str, torch.device, Replica], Generator]] = {
    "builtin": _builtin,
    "vllm": VllmGenerator,
}
