"""The learning rate of an optimizer step, and the step's position in the run (`RunProgress`).

A schedule ends with the run, but the number of optimizer steps is only known when the run is over:
a script may update twice in a step, or learn from fewer rows than it draws. The number of the run's
steps is known, so the rate follows these. Numbers only; knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spmdflow.config.schema import OptimizerConfig


def learning_rate(
    cfg: OptimizerConfig, step: int, total_steps: int, *, position: int | None = None
) -> float:
    """Return the rate of optimizer step `step` (from 0), at this position of total_steps.

    Warm-up while step < warmup_steps: lr (step + 1) / warmup_steps. Then, with x = (position -
    warmup_steps) / (total_steps - warmup_steps), clamped to [0, 1]: constant lr, linear lr (1 - x),
    cosine lr (1 + cos(pi x)) / 2. A decaying rate would reach 0 right after the last position.
    position None: at `step`.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if position is None:
        position = step
    remaining = max(1, total_steps - cfg.warmup_steps)
    done = (position - cfg.warmup_steps) / remaining
    return cfg.lr * _SCHEDULES[cfg.schedule](min(1.0, max(0.0, done)))


_SCHEDULES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}


class RunProgress:
    """The position of an optimizer in the run, in optimizer steps.

    Each step of the run counts as many optimizer steps as the largest one so far has taken, or as
    planned until the first one has ended. If the plan is right, the position is the number of
    optimizer steps done.
    """

    def __init__(self) -> None:
        """Starts with an unknown run."""
        self.num_steps = 0
        """Steps of the run. 0: unknown, because no update of a step has begun."""
        self.most_in_step = 0
        """Optimizer steps of the largest step that has ended. 0: none has ended."""
        self._planned_in_step = 1
        self._step = 0
        self._done_before = 0

    @property
    def in_step(self) -> int:
        """Assumed number of optimizer steps in a step of the run."""
        return self.most_in_step or self._planned_in_step

    @property
    def total(self) -> int:
        """Number of positions of the run."""
        return self.in_step * self.num_steps

    def begin_update(
        self, *, step: int, num_steps: int, planned_in_step: int, steps_done: int
    ) -> None:
        """Record that an update in this step (from 1) of the run begins.

        In a new step it first sets most_in_step to the largest number of optimizer steps that a
        step of the run has taken. steps_done: optimizer steps before this update. Does nothing if
        step or num_steps is 0, that is outside of a script's steps.
        """
        if step == 0 or num_steps == 0:
            return  # outside of the steps of a script
        if step != self._step:
            self.most_in_step = self.most_after(steps_done)
            self._step = step
            self._done_before = steps_done
        self.num_steps = num_steps
        self._planned_in_step = planned_in_step

    def most_after(self, steps_done: int) -> int:
        """`most_in_step` if the running step ends after this number of optimizer steps of the
        run."""
        if self._step == 0:
            return self.most_in_step
        return max(self.most_in_step, steps_done - self._done_before)

    def position_of(self, steps_done: int) -> int:
        """The position of the next optimizer step, never beyond the end of the running step."""
        within = min(steps_done - self._done_before, self.in_step)
        return (self._step - 1) * self.in_step + within

    def state(self, steps_done: int) -> dict[str, Any]:
        """State for a run that continues after the running step: JSON data."""
        return {"most_in_step": self.most_after(steps_done)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore most_in_step from `state`. The next update begins a new step of the run."""
        self.most_in_step = int(state.get("most_in_step", 0))
        self._step = 0
        self._done_before = 0
