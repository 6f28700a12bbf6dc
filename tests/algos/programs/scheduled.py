"""SFT with any number of updates in a step; steps with all rows masked, or a loss of nan."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow import Flow, Loss, SFTConfig, SupervisedWorker, register
from spmdflow.models.rows import example_rows


@dataclass
class Config(SFTConfig):
    """Those of SFT, and what is unusual."""

    updates: int = 1
    """Update calls of a step."""
    counted: int = 0
    """Steps that the script counts; 0: total_steps."""
    factor: float = 1.0
    """Of the loss."""
    masked: list[int] = field(default_factory=list)
    """Steps without a token to learn."""
    poisoned: list[int] = field(default_factory=list)
    """Steps whose loss is nan."""


class Likelihood(Loss):
    """Mean -log p of the learnt tokens, times a factor."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, output, micro, totals) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share; without any token 0, as of the package's own losses."""
        log_probs = micro.spread(output.log_probs())
        loss = -(log_probs * micro.response_mask).sum() / max(totals["tokens"], 1.0)
        return loss * self._factor, {}


class Pupil(SupervisedWorker):
    """Learns by a loss of its own."""

    @register(transfer_mode="3D_PROTO", reads=("prompts", "loss_mask"), minibatches=True)
    def learn(self, batch: TensorDict, *, factor: float, masked: bool) -> dict[str, float]:
        """One optimizer step for each mini-batch; masked: there is no token to learn."""
        rows = example_rows(batch)
        if masked:
            rows["response_mask"] = torch.zeros_like(rows["response_mask"])
        return self.train(rows, Likelihood(factor), prefix="actor")


def main(flow: Flow, cfg: Config) -> None:
    """Each update's learning rate is a metric."""
    actor = flow.spawn(Pupil, cfg.actor)
    prompts = flow.prompts(cfg.data)
    for step in flow.steps(cfg.counted or cfg.total_steps):
        batch = next(prompts)
        factor = float("nan") if step.number in cfg.poisoned else cfg.factor
        for number in range(cfg.updates):
            result = actor.learn(batch, factor=factor, masked=step.number in cfg.masked)
            step.log(result)
            rates = {n: x for n, x in dict(result).items() if n == "actor/lr"}
            step.log({f"lr/{number}": rate for rate in rates.values()})
        flow.save(every=cfg.save_every)
