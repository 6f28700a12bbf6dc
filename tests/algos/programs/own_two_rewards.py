"""GRPO on two rewards, whose weights change from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from spmdflow import (
    ActorWorker,
    Flow,
    GRPOConfig,
    PromptStream,
    RewardConfig,
    RewardWorker,
    compute_advantages,
    part,
    row_maths,
)


@dataclass
class Config(GRPOConfig):
    """GRPO's settings and a second reward."""

    second: RewardConfig = part(RewardConfig)


@row_maths(
    reads=("scores", "token_level_rewards", "second_scores", "second_rewards"),
    writes=("scores", "token_level_rewards"),
)
def mix(batch: TensorDict, *, weight: float, reduce: Any, report: Any) -> TensorDict:
    """Both rewards, the second with a weight; ragged columns are added as they are."""
    report({"reward/second_weight": weight})
    columns = {
        "scores": batch["scores"] + weight * batch["second_scores"],
        "token_level_rewards": batch["token_level_rewards"] + batch["second_rewards"] * weight,
    }
    return TensorDict(columns, batch_size=batch.batch_size)


def main(flow: Flow, cfg: Config) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    second = flow.spawn(RewardWorker, cfg.second, name="second")
    prompts = flow.keep(prompts=PromptStream(cfg.data))
    flow.assume({"actor/entropy": 0.5})

    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        judged = second.compute_reward(batch, prefix="second")
        judged = judged.only("scores", "token_level_rewards")
        judged = judged.rename(second_scores="scores", second_rewards="token_level_rewards")
        both = reward.compute_reward(batch) | judged
        batch |= both.map(mix, weight=step.number / cfg.total_steps)
        batch |= batch.map(compute_advantages, estimator="grpo", cfg=cfg.advantage)
        step.log(actor.update_actor(batch), entropy=batch.metrics["actor/entropy"])
        flow.evaluate(every=cfg.eval_every)
