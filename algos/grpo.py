"""GRPO: the other samples of a prompt take the critic's place (Shao et al. 2024, section 4.1).

Departures from the paper:
1. the reference is the policy that training started from, for the whole run;
2. outcome rewards only: every token of a response has the same advantage;
3. grpo_stories.yaml has the KL to the reference in the reward (advantage.kl_coef); the paper has it
   in the loss (actor.loss.kl_coef);
4. choices by name: advantage.estimator=dr_grpo with
   actor.loss.aggregation=sequence-mean-token-sum-by-budget is Dr. GRPO (Liu et al. 2025),
   actor.loss.surrogate=gspo with clip ratios of about 3e-4 is GSPO (Zheng et al. 2025).

KL to the reference: in the loss (grpo.yaml, grpo_7b.yaml, grpo_32b.yaml, grpo_7b_128k.yaml,
grpo_32b_128k.yaml, grpo_30b_a3b.yaml, grpo_235b_a22b.yaml, grpo_gpt_oss_20b.yaml,
grpo_countdown.yaml, grpo_gsm8k.yaml),
in the reward (grpo_stories.yaml), none (grpo_sums.yaml).

    torchrun --nproc-per-node 4 -m spmdflow.run algos/grpo.py
"""

from spmdflow import (
    ActorWorker,
    Flow,
    GRPOConfig,
    ReferenceWorker,
    RewardWorker,
    compute_advantages,
)


def main(flow: Flow, cfg: GRPOConfig) -> None:
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
