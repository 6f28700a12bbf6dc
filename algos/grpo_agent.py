"""GRPO on episodes: many turns with an environment, which scores them (Shao et al. 2024).

`grpo.py` with two other lines: `run_episodes` generates and scores, so no reward is called, and
`segments` makes a row of each of an episode's conversations.
Departures from the paper are those of `grpo.py`, and:
1. tokens that the environment said are read, never learnt (response_mask);
2. an episode that failed, or that the environment left out, is in no group's baseline.

KL to the reference: none (grpo_agent.yaml, grpo_agent_calculator.yaml, grpo_agent_race.yaml,
grpo_agent_thoughts.yaml).

    torchrun --nproc-per-node 2 -m spmdflow.run algos/grpo_agent.py
"""

from spmdflow import (
    ActorWorker,
    Flow,
    GRPOAgentConfig,
    ReferenceWorker,
    compute_advantages,
)


def main(flow: Flow, cfg: GRPOAgentConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    prompts = flow.prompts(cfg.data)
    flow.evaluate(actor, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation
        batch = actor.run_episodes(next(prompts)).segments()
        # Stage 2: preparation
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        # Stage 3: learning
        step.log(actor.update_actor(batch))
        flow.evaluate(actor, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
