"""PPO whose step N waits as long as there is a file RUN_DIR.hold-N."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from algos import ppo
from spmdflow import Flow, PPOConfig
from spmdflow.controller.step import Step


class HeldFlow:
    """A flow but for its steps."""

    def __init__(self, flow: Flow, run_dir: str) -> None:
        self._flow = flow
        self._run_dir = run_dir

    def steps(self, total: int) -> Iterator[Step]:
        """Each once it is not held any more."""
        for step in self._flow.steps(total):
            while Path(f"{self._run_dir}.hold-{step.number}").exists():
                time.sleep(0.02)
            yield step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flow, name)


def main(flow: Flow, cfg: PPOConfig) -> None:
    """As algos/ppo.py."""
    ppo.main(HeldFlow(flow, cfg.run.dir), cfg)
