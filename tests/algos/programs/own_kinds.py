# own_kinds.py
"""PPO; the first two imports register an engine and a generator of the user's own."""

import ddp_engine  # noqa: F401
import plain_generator  # noqa: F401

from spmdflow import (
    ActorWorker,
    CriticWorker,
    Flow,
    PPOConfig,
    ReferenceWorker,
    RewardWorker,
    compute_advantages,
)


def main(flow: Flow, cfg: PPOConfig) -> None:
    """As algos/ppo.py."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    critic = flow.spawn(CriticWorker, cfg.critic)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    flow.evaluate(actor, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(critic.update_critic(batch), actor.update_actor(batch))
        flow.evaluate(actor, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
