"""ReMax: the greedy response's score takes the critic's place (Li et al. 2024, algorithm 1).

Departures from the paper:
1. the policy's ratio is clipped, so that a batch may be cut into several optimizer steps;
   actor.loss.surrogate=plain with one mini-batch is the paper's REINFORCE;
2. several samples of a prompt (data.samples_per_prompt; the paper has one) share its greedy
   response;
3. the KL to the reference is in the reward of the samples (advantage.kl_coef), not in the
   baseline.

KL to the reference: in the reward (remax.yaml).

    torchrun --nproc-per-node 4 -m spmdflow.run algos/remax.py
"""

from spmdflow import (
    ActorWorker,
    Flow,
    ReferenceWorker,
    RemaxConfig,
    RewardWorker,
    as_baseline,
    compute_advantages,
)


def main(flow: Flow, cfg: RemaxConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    flow.evaluate(actor, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation, sampled and greedy
        drawn = next(prompts)
        batch = actor.generate_sequences(drawn)
        greedy = actor.generate_sequences(drawn.first_samples(), greedy=True)
        # Stage 2: preparation
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(greedy, prefix="greedy").map(as_baseline).shared_by(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        # Stage 3: learning
        step.log(actor.update_actor(batch))
        flow.evaluate(actor, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
