"""RLOO: each sample's baseline is the mean of the prompt's other samples (Ahmadian et al. 2024).

Departures from the paper (section 3.2; the estimator is Kool et al. 2019):
1. the policy's ratio is clipped, so that a batch may be cut into several optimizer steps;
   actor.loss.surrogate=plain with one mini-batch is the paper's REINFORCE;
2. the loss is the mean over tokens; the paper's gradient, of a whole response as one action, is
   actor.loss.aggregation=sequence-mean-token-sum.
As in the paper the KL to the reference is in the reward, and so in the baseline.

KL to the reference: in the reward (rloo.yaml).

    torchrun --nproc-per-node 4 -m spmdflow.run algos/rloo.py
"""

from spmdflow import (
    ActorWorker,
    Flow,
    ReferenceWorker,
    RewardWorker,
    RLOOConfig,
    compute_advantages,
)


def main(flow: Flow, cfg: RLOOConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    flow.evaluate(actor, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation
        batch = actor.generate_sequences(next(prompts))
        # Stage 2: preparation
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        # Stage 3: learning
        step.log(actor.update_actor(batch))
        flow.evaluate(actor, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
