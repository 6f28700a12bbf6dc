"""Safe RLHF: PPO under a limit on the mean cost, PPO-Lagrangian with PPO-ptx (Dai et al. 2024).

Departures from the paper:
1. the bundled demonstration's cost is a rule, not a model: 1 if a response holds the digit
   7, else 0 (spmdflow.rewards.arithmetic:unwanted_digit); cost.model.path names a cost model;
2. the multiplier follows the mean cost of the step's batch, from the first step on; the paper's
   code uses a moving mean and starts later;
3. the mixed advantages are normalised over the global batch (advantage.whiten);
4. each sample brings one pre-training text along, and both are in one optimizer step.

KL to the reference: in the reward (safe_rlhf.yaml).

    torchrun --nproc-per-node 4 -m spmdflow.run algos/safe_rlhf.py
"""

from spmdflow import (
    ActorWorker,
    CostCriticWorker,
    CostWorker,
    CriticWorker,
    Flow,
    LagrangeMultiplier,
    ReferenceWorker,
    RewardWorker,
    SafeRLHFConfig,
    compute_safe_advantages,
)


def main(flow: Flow, cfg: SafeRLHFConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    critic = flow.spawn(CriticWorker, cfg.critic)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    cost = flow.spawn(CostWorker, cfg.cost)
    cost_critic = flow.spawn(CostCriticWorker, cfg.cost_critic)
    prompts = flow.prompts(cfg.data)
    texts = flow.prompts(cfg.pretrain, name="texts")
    multiplier = flow.keep(multiplier=LagrangeMultiplier(cfg.lagrange))
    flow.evaluate(actor, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation
        batch = actor.generate_sequences(next(prompts))
        # Stage 2: preparation
        batch |= actor.compute_loss(next(texts)).aligned_with(batch)
        batch |= actor.compute_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= cost_critic.compute_cost_values(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= cost.compute_cost(batch)
        multiplier.update(batch.mean("costs"))
        weight = multiplier.value
        batch |= batch.map(compute_safe_advantages, multiplier=weight, cfg=cfg.advantage)
        # Stage 3: learning
        step.log(critic.update_critic(batch), actor.update_actor(batch), multiplier=weight)
        step.log(cost_critic.update_cost_critic(batch))
        flow.evaluate(actor, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
