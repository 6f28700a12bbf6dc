"""GRPO with the best of two as advantage, and a KL in the reward whose weight adapts."""

from spmdflow import (
    ActorWorker,
    AdaptiveKL,
    Flow,
    GRPOConfig,
    ReferenceWorker,
    RewardWorker,
    compute_advantages,
    measure_kl,
)


def main(flow: Flow, cfg: GRPOConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weight = flow.keep(weight=AdaptiveKL(cfg.advantage, target=0.5))
    flow.evaluate(actor, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation
        batch = actor.generate_sequences(next(prompts))
        # Stage 2: preparation
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(measure_kl)
        weight.update(batch.mean("reference_kl"))
        applied = weight.applied_to(cfg.advantage)
        batch |= batch.map(compute_advantages, estimator="pass_at_k", cfg=applied)
        # Stage 3: learning
        step.log(actor.update_actor(batch), kl_coef=weight.value)
        flow.evaluate(actor, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
