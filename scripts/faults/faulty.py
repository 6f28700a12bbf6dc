"""The toy run that scripts/fault_table.py harms, and reward functions that fail."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from spmdflow.config.schema import DataConfig, EngineConfig, RunConfig
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import Worker

HARMED = "harmed"
"""File that says when a run harmed itself."""


@dataclass
class FaultyConfig:
    """The worker's settings."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    fault: str = "none"
    victim: int = 1
    at_call: int = 5


@dataclass
class Config:
    """Settings of the toy run."""

    run: RunConfig
    data: DataConfig
    placement: Any
    faulty: FaultyConfig = field(default_factory=FaultyConfig)
    total_steps: int = 100_000
    eval_every: int = 0


class FaultyWorker(Worker):
    """Calls of a few milliseconds with a collective at their end, until the fault comes."""

    role = "faulty"

    def __init__(self, config: FaultyConfig, context: Any) -> None:
        super().__init__(config, context)
        self._faults = config
        self._calls = 0

    @register(transfer_mode="3D_PROTO", reads=("prompts",), writes=("number",))
    def check(self, batch: TensorDict) -> TensorDict:
        """The call that goes wrong on the victim."""
        self._calls += 1
        time.sleep(0.02)
        fault = self._faults.fault
        is_time = self._calls >= self._faults.at_call
        if is_time and self.context.rank == self._faults.victim:
            if self._calls == self._faults.at_call:
                Path(self.context.run_dir, HARMED).write_text(str(time.time()))
            if fault == "endless":
                _loop_forever()
            elif fault == "endless_c":
                re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter
            elif fault == "slow":
                time.sleep(8.0)
        if not (is_time and fault == "skip" and self.context.rank == self._faults.victim):
            ranks = self.context.layout.ranks
            dist.all_reduce(torch.ones(1), group=self.context.groups.get(ranks))
        number = self.call.row_ids.float()
        return TensorDict({"number": number}, batch_size=[len(number)])

    @classmethod
    def needed_groups(cls, config: Any, layout: Any) -> list[tuple[int, ...]]:
        """All its ranks."""
        return [tuple(layout.ranks)]


def _loop_forever() -> None:
    while True:
        pass


def main(flow: Any, cfg: Config) -> None:
    """Calls, one after the other."""
    faulty = flow.spawn(FaultyWorker, cfg.faulty)
    prompts = flow.prompts(cfg.data)
    for _ in flow.steps(cfg.total_steps):
        batch = next(prompts)
        batch |= faulty.check(batch)
        batch.fetch("number")


def never_returns(prompt: str, response: str, row: dict[str, Any]) -> float:
    """A reward function."""
    _note_harm()
    while True:
        pass


def not_a_number(prompt: str, response: str, row: dict[str, Any]) -> float:
    """A reward function."""
    _note_harm()
    return float("nan")


def _note_harm() -> None:
    note = Path(os.environ["SPMDFLOW_FAULT_DIR"], HARMED)
    if not note.exists():
        note.write_text(str(time.time()))
