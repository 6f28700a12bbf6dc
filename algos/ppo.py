"""PPO with critic, reference and reward models (HybridFlow section 4.2; Ouyang et al. 2022).

Departures from the papers:
1. ppo.yaml has the KL to the reference in the policy loss (actor.loss.kl_coef); the papers have it
   in the reward (advantage.kl_coef), as the other YAML files do;
2. advantages are normalised over the global batch, once, before the mini-batches are cut;
3. without a reward model the critic starts from the actor, with a zero value head (critic.model
   names another model).

KL to the reference: in the loss (ppo.yaml), in the reward (ppo_70b.yaml, ppo_dialogues.yaml,
ppo_stories.yaml).

    torchrun --nproc-per-node 4 -m spmdflow.run algos/ppo.py
"""

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
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    critic = flow.spawn(CriticWorker, cfg.critic)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    flow.evaluate(actor, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation
        batch = actor.generate_sequences(next(prompts))
        # Stage 2: preparation
        batch |= actor.compute_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        # Stage 3: learning
        step.log(critic.update_critic(batch), actor.update_actor(batch))
        flow.evaluate(actor, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
