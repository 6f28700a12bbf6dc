"""DAPO: clip-higher, dynamic sampling, token-level loss, overlong shaping (Yu et al. 2025).

GRPO's advantages without a critic and without a reference.

Departures from the paper:
1. every round of dynamic sampling draws data.prompts_per_step prompts; rows beyond a full batch
   are dropped, and the run ends if sampling.max_rounds rounds do not fill one;
2. the length penalty's buffer is a setting of the task (overlong.buffer_tokens; the paper: 4,096
   of 20,480 tokens), and is added after dynamic sampling, which compares the bare scores.

KL to the reference: none (dapo.yaml, dapo_sums.yaml, dapo_instructions.yaml).

    torchrun --nproc-per-node 4 -m spmdflow.run algos/dapo.py
"""

from spmdflow import (
    ActorWorker,
    DAPOConfig,
    DynamicSampling,
    Flow,
    RewardWorker,
    add_overlong_penalty,
    compute_advantages,
)


def main(flow: Flow, cfg: DAPOConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    num_rows = cfg.data.prompts_per_step * cfg.data.samples_per_prompt
    max_tokens = cfg.actor.rollout.max_new_tokens
    flow.evaluate(actor, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation, until the batch is full of prompts whose samples differ
        sampling = DynamicSampling(num_rows, cfg.sampling)
        while not sampling.is_full:
            drawn = actor.generate_sequences(next(prompts))
            drawn |= reward.compute_reward(drawn)
            sampling.add(drawn)
        batch = sampling.batch()
        # Stage 2: preparation
        batch |= actor.compute_log_prob(batch)
        shaped = batch.map(add_overlong_penalty, cfg=cfg.overlong, max_tokens=max_tokens)
        batch = batch.drop("token_level_rewards") | shaped
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        # Stage 3: learning
        step.log(sampling.metrics(), actor.update_actor(batch))
        flow.evaluate(actor, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
