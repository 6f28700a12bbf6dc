"""Best-of-n distillation: the best of a prompt's samples is imitated, by a method of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tensordict import TensorDict

from spmdflow import (
    ActorWorker,
    Flow,
    GRPOConfig,
    PromptStream,
    RewardWorker,
    SupervisedLoss,
    register,
)


@dataclass
class Config(GRPOConfig):
    """GRPO's settings; nothing measures a KL."""

    reference: ClassVar[None] = None  # type: ignore[misc, assignment]


class Distiller(ActorWorker):
    """An actor that can imitate responses."""

    @register(
        transfer_mode="3D_PROTO", reads=("prompts", "responses", "response_mask"), minibatches=True
    )
    def imitate(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step of cross-entropy for each mini-batch."""
        return self.train(batch, SupervisedLoss(), prefix="actor")


def main(flow: Flow, cfg: Config) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(Distiller, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.keep(prompts=PromptStream(cfg.data))
    flow.assume(scores=[0.0, 1.0])

    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= reward.compute_reward(batch)
        best: dict[int, tuple[float, int]] = {}
        scores = batch.fetch("scores")["scores"].tolist()
        for place, (group, score) in enumerate(zip(batch.group_numbers(), scores, strict=True)):
            best[group] = max(best.get(group, (score, place)), (score, place))
        chosen = batch.select([place for _, place in best.values()])
        step.log(actor.imitate(chosen), best=chosen.mean("scores"), all=batch.mean("scores"))
        flow.evaluate(every=cfg.eval_every)
