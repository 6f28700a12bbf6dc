"""Steps that a test holds: a call of each step goes on until a file says otherwise.

A script for `torchrun ... -m spmdflow.run`. RUN_DIR/step-N-is-under-way appears when the call of
step N runs on every rank; it returns once RUN_DIR/go-on is there, or after waiter.seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from spmdflow import Flow, GRPOConfig, Worker, part, register, setting


@dataclass
class WaiterConfig:
    """How long a step lasts."""

    seconds: float = setting("Seconds that a step lasts at most.", 600.0)


@dataclass
class Config(GRPOConfig):
    """No model is built and no data is read: a run that only waits."""

    waiter: WaiterConfig = part(WaiterConfig)
    reward: ClassVar[None] = None  # type: ignore[misc, assignment]


class Waiter(Worker):
    """Waits in the compute lane, as a long call does."""

    role = "waiter"

    @register(transfer_mode="ONE_TO_ALL")
    def wait(self, *, run_dir: str, step: int, num_ranks: int) -> None:
        """Hold the step."""
        folder = Path(run_dir)
        (folder / f"step-{step}-runs-on-{self.context.rank}").touch()
        while len(list(folder.glob(f"step-{step}-runs-on-*"))) < num_ranks:
            time.sleep(0.01)
        (folder / f"step-{step}-is-under-way").touch()
        until = time.monotonic() + self.cfg.seconds
        while not (folder / "go-on").exists() and time.monotonic() < until:
            time.sleep(0.01)


def main(flow: Flow, cfg: Config) -> None:
    """The algorithm; runs once, on the controller."""
    waiter = flow.spawn(Waiter, cfg.waiter)
    num_ranks = len(waiter.target.layout.ranks)

    for step in flow.steps(cfg.total_steps):
        held = waiter.wait(run_dir=cfg.run.dir, step=step.number, num_ranks=num_ranks)
        held.values_by_rank()
        flow.save(every=cfg.save_every)
