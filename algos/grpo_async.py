"""GRPO off policy by a bound: generation runs up to max_staleness steps ahead of training.

The generator has ranks and weights of its own and is never waited for longer than the oldest rows
take. Departures from `grpo.py`, none of them with max_staleness=0:
1. a token comes from a policy of up to max_staleness updates ago. Rows under way go on with new
   weights, token by token; truncated importance weights correct for both (Espeholt et al. 2018;
   Yao et al. 2025).

KL to the reference: in the loss (grpo_async.yaml).

    torchrun --nproc-per-node 4 -m spmdflow.run algos/grpo_async.py
"""

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
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(PolicyWorker, cfg.actor)
    generator = flow.spawn(GeneratorWorker, cfg.actor)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weights = flow.connect(actor, generator)
    queue = flow.queue(prompts, weights, max_staleness=cfg.max_staleness)
    flow.evaluate(generator, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation, up to max_staleness steps ahead
        batch = next(queue)
        # Stage 2: preparation
        batch |= actor.compute_log_prob(batch)
        if cfg.max_staleness:
            batch |= batch.map(compute_rollout_weights, cfg=cfg.correction)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        # Stage 3: learning
        step.log(actor.update_actor(batch))
        weights.sync()
        flow.evaluate(generator, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
