"""AdamW over the part of one rank, and the learning-rate schedule.

AdamW is elementwise, so stepping the parts equals stepping the whole (Loshchilov and Hutter
2019). The step works on plain tensors that share storage with the engine's parameters.
Knows no collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spmdflow.config.schema import OptimizerConfig
from spmdflow.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(cfg: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step number step (from 0).

    Warm-up: lr (step + 1) / warmup_steps. Then with x in [0, 1) the done share of the remaining
    steps: constant lr, linear lr (1 - x), cosine lr (1 + cos(pi x)) / 2; x reaches 1, and the
    rate zero, right after the last step.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    remaining = max(1, total_steps - cfg.warmup_steps)
    done = min(1.0, (step - cfg.warmup_steps) / remaining)
    return cfg.lr * _SCHEDULES[cfg.schedule](done)


_SCHEDULES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements, a float64 scalar on device."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    return total


def clip_(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients in place by max_norm / norm if the global norm exceeds max_norm."""
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)


class Scheduled:
    """What every optimizer counts: the steps done, and the learning rate of the next one."""

    def __init__(self, cfg: OptimizerConfig, total_steps: int) -> None:
        """total_steps: of the whole run; ConfigError if a schedule that ends with it has none."""
        if cfg.schedule != "constant" and total_steps < 1:
            raise ConfigError(
                f"optimizer.schedule {cfg.schedule}: got {total_steps} optimizer steps in total, "
                f"expected at least 1, as it ends with them; set total_steps or choose the "
                f"constant schedule"
            )
        self.cfg, self.total_steps, self.steps_done = cfg, total_steps, 0

    @property
    def next_lr(self) -> float:
        """The rate that the next step will use."""
        return learning_rate(self.cfg, self.steps_done, self.total_steps)

    def restored(self, steps_done: int) -> None:
        """The weights and moments were overwritten with those after so many steps."""
        self.steps_done = steps_done


class ShardedAdamW(Scheduled):
    """AdamW with a schedule over named float32 shards, which may be empty on some ranks."""

    def __init__(self, shards: Mapping[str, Tensor], cfg: OptimizerConfig, total_steps: int):
        super().__init__(cfg, total_steps)
        self._parameters = {name: nn.Parameter(shard.detach()) for name, shard in shards.items()}
        self._settings: dict[str, Any] = {
            "lr": cfg.lr,
            "betas": (cfg.betas[0], cfg.betas[1]),
            "weight_decay": cfg.weight_decay,
            "fused": True,
        }
        self._stepper = self._stepper_of(list(self._parameters.values()))
        self._state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            if self.owns(name):
                # made now, not at the first step: memory is known and checkpoints look alike
                moments = {moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS}
                self._state[name] = {"step": torch.zeros((), device=parameter.device), **moments}
                self._adamw.state[parameter] = self._state[name]

    def owns(self, name: str) -> bool:
        """Whether this rank steps (its rows of) the tensor and has the moments."""
        return name in self._parameters

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the shards in place from their gradients; a shard without one is left alone."""
        for group in self._stepper.param_groups:
            group["lr"] = self.next_lr
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        self._stepper.step()
        self._stepper.zero_grad()
        self.steps_done += 1

    def moments(self) -> list[Tensor]:
        """The live moments of all tensors."""
        return [state[moment] for state in self._state.values() for moment in MOMENTS]

    def moments_of(self, name: str) -> dict[str, Tensor]:
        """The live moments of one tensor by their names; none if another rank steps it."""
        return {moment: self._state[name][moment] for moment in MOMENTS if name in self._state}

    def restored(self, steps_done: int) -> None:
        """See `Scheduled.restored`."""
        super().restored(steps_done)
        for state in self._state.values():
            state["step"].fill_(steps_done)

    def _stepper_of(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer whose `step` updates all parameters."""
        filled = [parameter for parameter in parameters if parameter.numel()]
        return torch.optim.AdamW(filled or parameters, **self._settings)

    @property
    def _adamw(self) -> torch.optim.Optimizer:
        """The one that has this rank's moments."""
        return self._stepper
