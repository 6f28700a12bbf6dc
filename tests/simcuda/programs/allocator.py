"""A script that says how the allocator of device memory is set up when its `main` begins."""

import json
import os
from dataclasses import dataclass

import torch

from spmdflow import Flow, part
from spmdflow.config.schema import ActorConfig, DataConfig, ScriptConfig


@dataclass
class Config(ScriptConfig):
    """One actor, whose generator decides; it is never built."""

    data: DataConfig = part(DataConfig)
    actor: ActorConfig = part(ActorConfig)


def main(flow: Flow, cfg: Config) -> None:
    """Print the variables of the environment, and what torch has read."""
    variables = {}
    for name, text in os.environ.items():
        if name.endswith("ALLOC_CONF"):
            variables[name] = text
    facts = {"variables": variables, "torch": torch._C._accelerator_getAllocatorSettings()}
    for _ in flow.steps(cfg.total_steps):
        print(json.dumps(facts))
