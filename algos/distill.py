"""On-policy distillation: the student samples, a teacher scores every token (Agarwal et al. 2024).

The reward of a token is log p_teacher - log p_student, whose mean over the student's samples is the
negative reverse KL; the update is a policy gradient with it (Lu and Thinking Machines 2025).

Departures from the papers:
1. the KL's estimate is of the sampled token alone (k1), not of the whole vocabulary: only numbers
   of sampled tokens travel from the teacher's ranks;
2. the ratio is clipped as PPO's, so that a batch may be cut into several optimizer steps;
3. the task's reward is only evaluated; add its token_level_rewards with a map function of your own.

KL to the reference: none (distill.yaml).

    torchrun --nproc-per-node 4 -m spmdflow.run algos/distill.py teacher.model.path=FOLDER
"""

from spmdflow import (
    ActorWorker,
    DistillConfig,
    Flow,
    ReferenceWorker,
    RewardWorker,
    compute_advantages,
    compute_teacher_rewards,
)


def main(flow: Flow, cfg: DistillConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    teacher = flow.spawn(ReferenceWorker, cfg.teacher, name="teacher")
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    flow.evaluate(actor, reward, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation
        batch = actor.generate_sequences(next(prompts))
        # Stage 2: preparation
        batch |= actor.compute_log_prob(batch)
        batch |= teacher.compute_ref_log_prob(batch)
        batch |= batch.map(compute_teacher_rewards)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        # Stage 3: learning
        step.log(actor.update_actor(batch))
        flow.evaluate(actor, reward, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
