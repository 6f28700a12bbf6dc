"""REINFORCE++: no critic, advantages normalised over the global batch (Hu 2025).

Departures from the paper:
1. none for advantage.estimator=reinforce_pp: rewards to go with the KL (k1) in the reward, PPO's
   clipped loss, one normalisation of all tokens of the batch;
2. advantage.estimator=reinforce_pp_baseline, its variant for several samples of a prompt,
   subtracts their mean first; set advantage.kl_coef=0 and actor.loss.kl_coef with
   actor.loss.kl_estimator=k2 to have the KL in the loss, as the paper does there.

KL to the reference: in the reward (reinforce_pp.yaml).

    torchrun --nproc-per-node 4 -m spmdflow.run algos/reinforce_pp.py
"""

from spmdflow import (
    ActorWorker,
    Flow,
    ReferenceWorker,
    ReinforcePPConfig,
    RewardWorker,
    compute_advantages,
)


def main(flow: Flow, cfg: ReinforcePPConfig) -> None:
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
