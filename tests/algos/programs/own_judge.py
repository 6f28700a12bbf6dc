"""A judge of the script's own with plain settings, and no reward model or function at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from spmdflow import (
    ActorWorker,
    Flow,
    GRPOConfig,
    Mean,
    Worker,
    compute_advantages,
    part,
    ragged_from_rows,
    register,
    rows_of,
    setting,
)


@dataclass
class JudgeConfig:
    """What the judge likes."""

    token: int = setting("Token that is worth one point.", 5)


@dataclass
class Config(GRPOConfig):
    """GRPO's settings with a judge in the place of a reward."""

    judge: JudgeConfig = part(JudgeConfig)
    reward: ClassVar[None] = None  # type: ignore[misc, assignment]


class Judge(Worker):
    """Counts a token."""

    role = "judge"

    def __init__(self, cfg: JudgeConfig, context: Any) -> None:
        super().__init__(cfg, context)
        self.seen = 0

    @register(
        transfer_mode="DP_PROTO", reads=("responses",), writes=("scores", "token_level_rewards")
    )
    def judge(self, batch: TensorDict) -> TensorDict:
        """scores (B,): how often the token occurs."""
        rows = [(row == self.cfg.token).float() for row in rows_of(batch["responses"])]
        scores = torch.tensor([float(row.sum()) for row in rows])
        self.seen += len(rows)
        self.report({"judge/mean": Mean(float(scores.sum()), len(scores))})
        made = TensorDict({"scores": scores}, batch_size=batch.batch_size)
        made["token_level_rewards"] = ragged_from_rows(rows, dtype=torch.float32)
        return made


def main(flow: Flow, cfg: Config) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    judge = flow.spawn(Judge, cfg.judge)
    prompts = flow.prompts(cfg.data)

    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= judge.judge(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
