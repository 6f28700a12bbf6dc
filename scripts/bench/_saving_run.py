"""The run that `bench.py saving` measures: steps of a fixed length, without and with a save.

BENCH_SAVING: JSON of work (device or cpu), amount, steps, rounds.
"""

from __future__ import annotations

import json
import os
import resource
import time
from typing import Any

import torch

from spmdflow.models.policy import ActorWorker
from spmdflow.worker_api.register import register

PHASES = ("none", "waited", "beside")


class Actor(ActorWorker):
    """An actor whose step is as long as it is told."""

    @register(transfer_mode="ONE_TO_ALL")
    def work(self, work: str, amount: float) -> float:
        """A step that leaves the processors alone for seconds, or a number of products."""
        if work == "device":
            time.sleep(amount)
            return 0.0
        values = torch.ones(384, 384)
        for _ in range(int(amount)):
            values @ values
        return 0.0

    @register(transfer_mode="ALL_TO_ALL")
    def processor_seconds(self) -> float:
        """Of this rank so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


def main(flow: Any, cfg: Any) -> None:
    """Each phase in turn, `rounds` times, after one that warms up; prints a line of JSON each."""
    given = json.loads(os.environ["BENCH_SAVING"])
    actor = flow.spawn(Actor, cfg.actor)
    saving = flow._saving
    each = given["steps"]
    began = 0.0
    used = 0.0
    copying = 0.0

    def look() -> tuple[float, float]:
        saving.finish()
        return time.monotonic(), sum(actor.processor_seconds().values_by_rank())

    for step in flow.steps((len(PHASES) * given["rounds"] + 1) * each):
        place, first = divmod(step.number - 1, each)
        phase = PHASES[(place - 1) % 3] if place else "warm"
        if not first:
            began, used = look()
            copying = 0.0
        actor.work(work=given["work"], amount=given["amount"])
        if not first and phase != "none":
            flow._finish(step)
            started = time.monotonic()
            flow._save(step.number)
            copying = time.monotonic() - started
            if phase == "waited":
                saving.finish()
        if first == each - 1:
            flow._finish(step)
            at = time.monotonic()
            ended, total = look()
            sealed = ended - at
            found = {"phase": phase, "seconds": at - began, "cpu_s": total - used}
            print("SAVING", json.dumps(found | {"copy_s": copying, "late_s": sealed}), flush=True)
