"""Trains from a queue and writes down what it trained: RUN_DIR/trained.jsonl, a line a step.

With lr so small that the policy hardly changes, lengths are draws from one distribution.
"""

from __future__ import annotations

import json
from pathlib import Path

from spmdflow import (
    Flow,
    GeneratorWorker,
    GRPOAsyncConfig,
    PolicyWorker,
    RewardWorker,
    compute_advantages,
)
from spmdflow.data.ragged import rows_of


def main(flow: Flow, cfg: GRPOAsyncConfig) -> None:
    actor = flow.spawn(PolicyWorker, cfg.actor)
    generator = flow.spawn(GeneratorWorker, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weights = flow.connect(actor, generator)
    queue = flow.queue(prompts, weights, max_staleness=cfg.max_staleness)

    for step in flow.steps(cfg.total_steps):
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
