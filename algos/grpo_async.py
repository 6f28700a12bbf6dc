"""GRPO, one step off policy: generation of step k+1 runs while step k is trained.

The generator has ranks and weights of its own. Departures from `grpo.py`:
1. samples come from the policy before the last update (never older: weights pass at the end of
   every step), and truncated importance weights correct for it (Espeholt et al. 2018; Yao et al.
   2025);
2. on resume the samples that were being generated are lost; their prompts are not drawn again.

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
    weights, ahead = flow.connect(actor, generator), None
    flow.evaluate(generator, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation, one step ahead
        if ahead is None:
            weights.sync()
            ahead = generator.generate_sequences(next(prompts))
        batch, ahead = ahead, generator.generate_sequences(next(prompts))
        # Stage 2: preparation
        batch |= actor.compute_log_prob(batch)
        batch |= batch.map(compute_rollout_weights, cfg=cfg.correction)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        # Stage 3: learning
        step.log(actor.update_actor(batch))
        weights.sync()
        flow.evaluate(generator, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
