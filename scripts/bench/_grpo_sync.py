"""`algos/grpo_async.py` without its lookahead: the same pools, each step waits for its samples."""

from __future__ import annotations

from spmdflow import (
    Flow,
    GeneratorWorker,
    GRPOAsyncConfig,
    PolicyWorker,
    ReferenceWorker,
    RewardWorker,
    compute_advantages,
    compute_rollout_weights,
)


def main(flow: Flow, cfg: GRPOAsyncConfig) -> None:
    """As the asynchronous script, but generation starts from the weights of the last update."""
    actor = flow.spawn(PolicyWorker, cfg.actor)
    generator = flow.spawn(GeneratorWorker, cfg.actor)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weights = flow.connect(actor, generator)
    flow.evaluate(generator, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        weights.sync()
        batch = generator.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= batch.map(compute_rollout_weights, cfg=cfg.correction)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
        flow.evaluate(generator, reward, every=cfg.eval_every)
