"""GRPO with an advantage and a policy loss of the user's own, by name."""

from dataclasses import dataclass

import torch

from spmdflow import (
    ActorWorker,
    CorrectionConfig,
    Flow,
    GRPOConfig,
    RewardWorker,
    advantage,
    compute_advantages,
    compute_rollout_weights,
    map_function,
    part,
    policy_loss,
)


@dataclass
class Config(GRPOConfig):
    """GRPO's settings and those of the weights."""

    correction: CorrectionConfig = part(CorrectionConfig)


@advantage("best_of_group", reads=("bonus",))
def best_of_group(samples, cfg):
    """The score less the group's mean, plus the row's bonus."""
    mean = samples.groups.means(samples.scores)
    found = samples.spread(samples.scores - mean + samples.columns["bonus"])
    return found, found


@policy_loss("unclipped")
def unclipped(log_probs, old_log_probs, advantages, mask, cfg):
    """(-r A, r, nothing clipped)."""
    ratio = torch.exp(log_probs - old_log_probs)
    return -ratio * advantages, ratio, torch.zeros_like(mask)


@map_function(reads=("scores",), writes=("bonus",))
def add_bonus(batch, *, reduce, report):
    """One more column for the estimator."""
    return batch.select("scores").rename_key_("scores", "bonus")


def main(flow: Flow, cfg: Config) -> None:
    """The loop, with importance weights for what the generator sampled."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(add_bonus)
        batch |= batch.map(compute_advantages, estimator="best_of_group", cfg=cfg.advantage)
        batch |= batch.map(compute_rollout_weights, cfg=cfg.correction)
        step.log(actor.update_actor(batch))
