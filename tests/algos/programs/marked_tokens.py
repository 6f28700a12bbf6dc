"""GRPO with a baseline for each token, and a loss that holds the tokens of largest covariance.

`SEEN` has what a run gave: on one process a test can read it.
"""

from typing import Any

from spmdflow import (
    ActorWorker,
    Flow,
    GRPOConfig,
    RewardWorker,
    compute_advantages,
    mark_covariant_tokens,
)

SEEN: list[dict[str, Any]] = []


def main(flow: Flow, cfg: GRPOConfig) -> None:
    """Two columns more than GRPO: squared_probs and covariant."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)

    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= actor.compute_squared_probs(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        batch |= batch.map(mark_covariant_tokens, cfg=cfg.actor.loss, seed=step.number)
        names = ("prompts", "responses", "squared_probs", "covariant")
        if cfg.eval_every:
            SEEN.append(batch.fetch(*names))
        step.log(actor.update_actor(batch), share=batch.metrics["actor/covariant_share"])
