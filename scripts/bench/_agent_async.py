"""`algos/grpo_agent.py` from a queue: episodes run up to max_staleness steps ahead of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from spmdflow import (
    CorrectionConfig,
    Flow,
    GeneratorWorker,
    GRPOAgentConfig,
    PolicyWorker,
    ReferenceWorker,
    compute_advantages,
    compute_rollout_weights,
    part,
    setting,
)


@dataclass
class Config(GRPOAgentConfig):
    """The settings of the agent and those of the queue."""

    more_roles: ClassVar[tuple[str, ...]] = ("generator",)

    correction: CorrectionConfig = part(CorrectionConfig)
    max_staleness: int = setting("See GRPOAsyncConfig.", 1, at_least=0)
    placement: Any = setting("See GRPOAsyncConfig.", "split")


def main(flow: Flow, cfg: Config) -> None:
    """As grpo_async.py with episodes."""
    actor = flow.spawn(PolicyWorker, cfg.actor)
    generator = flow.spawn(GeneratorWorker, cfg.actor)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    prompts = flow.prompts(cfg.data)
    weights = flow.connect(actor, generator)
    queue = flow.queue(prompts, weights, max_staleness=cfg.max_staleness)
    flow.evaluate(generator, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        batch = next(queue)
        batch |= actor.compute_log_prob(batch)
        if cfg.max_staleness:
            batch |= batch.map(compute_rollout_weights, cfg=cfg.correction)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
        weights.sync()
        flow.evaluate(generator, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
