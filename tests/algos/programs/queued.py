"""Trains from a queue and writes down what it trained: RUN_DIR/trained.jsonl, a line a step.

With lr so small that the policy hardly changes, lengths are draws from one distribution. A step
whose number is the ending of a file beside RUN_DIR (RUN_DIR.hold-6) begins when that is removed.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from spmdflow import (
    Flow,
    GeneratorWorker,
    GRPOAsyncConfig,
    PolicyWorker,
    RewardWorker,
    compute_advantages,
    register,
)
from spmdflow.data.ragged import rows_of

SHORT_TURNS = 2
FEW = 3


class Unhurried(GeneratorWorker):
    """In its first turns it draws a few tokens: rows are under way at the sync however long a step
    takes, if the generator has room for fewer rows than are begun."""

    @register(transfer_mode="ONE_TO_ALL")
    def go_on(self, turn: int) -> None:
        """A turn between two steps."""
        if turn > SHORT_TURNS:
            super().go_on(turn)
            return
        for _ in range(FEW):
            self.rows_ahead._step_requests()


def main(flow: Flow, cfg: GRPOAsyncConfig) -> None:
    actor = flow.spawn(PolicyWorker, cfg.actor)
    generator = flow.spawn(Unhurried, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weights = flow.connect(actor, generator)
    queue = flow.queue(prompts, weights, max_staleness=cfg.max_staleness)

    for step in flow.steps(cfg.total_steps):
        while Path(f"{cfg.run.dir}.hold-{step.number}").exists():
            time.sleep(0.02)
        batch = next(queue)
        found = batch.fetch("prompt_text", "token_versions")
        batch |= actor.compute_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
        versions = [row.tolist() for row in rows_of(found["token_versions"])]
        line = {"step": step.number, "prompts": found["prompt_text"], "versions": versions}
        with open(Path(cfg.run.dir) / "trained.jsonl", "a") as file:
            print(json.dumps(line), file=file)
        weights.sync()
        flow.save(every=cfg.save_every)
