"""Builds the generator that a rollout section names."""

from __future__ import annotations

import torch

from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import load
from spmdflow.kind.generator import generator_kind, generators_that_cut
from spmdflow.rollout.generator import Generator
from spmdflow.rollout.replica import Replica

_DTYPES = ("float32", "bfloat16")


def generator_of(
    cfg: RolloutConfig, model_path: str, device: torch.device, replica: Replica | None = None
) -> Generator:
    """This rank's part of the generator `cfg.engine`, with the weights of model_path.

    replica: the ranks that generate together and their groups; none: this rank alone. All of its
    ranks build the generator together. Its weights_version is NEVER: a sync must come before the
    first generation. It takes no seed, as responses depend on the seeds of their rows only.
    """
    kind, replica = generator_kind(cfg.engine), replica or Replica.alone()
    if cfg.dtype not in _DTYPES:
        raise ConfigError(
            f"rollout.dtype: got {cfg.dtype!r}, expected one of {', '.join(_DTYPES)}; "
            f"choose one of them"
        )
    if replica.size > 1 and not kind.cuts_model:
        raise ConfigError(
            f"rollout.engine={kind.name}: got generation replicas of {replica.size} ranks "
            f"(t{replica.tp_size}p{replica.pp_size}), expected 1, as it decodes on single ranks; "
            f"set actor.rollout.layout=t1 or actor.rollout.engine="
            f"{' or '.join(generators_that_cut())}"
        )
    cut = (replica,) if kind.cuts_model else ()
    generator: Generator = load(kind.implementation)(cfg, model_path, device, *cut)
    return generator
