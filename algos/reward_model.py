"""A reward model from preferences: pairwise Bradley-Terry (Ouyang et al. 2022, section 3.5).

Departures from the paper:
1. rows are single pairs, not the rankings of several answers to one prompt;
2. scores are not shifted to a mean of zero afterwards; PPO whitens advantages;
3. a step scores its pairs once more, without gradient: both answers of a pair need not be in one
   forward, so pairs may be split over micro-batches.

    torchrun --nproc-per-node 2 -m spmdflow.run algos/reward_model.py
"""

from spmdflow import Flow, RewardModelRunConfig, RewardModelWorker


def main(flow: Flow, cfg: RewardModelRunConfig) -> None:
    """The algorithm; runs once, on the controller."""
    reward_model = flow.spawn(RewardModelWorker, cfg.reward_model)
    prompts = flow.prompts(cfg.data)
    flow.evaluate(reward_model, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: pairs, which bring both answers
        batch = next(prompts)
        # Stage 3: learning
        step.log(reward_model.update_reward_model(batch))
        flow.evaluate(reward_model, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
