"""The optimizer of one rank's part of the weights, its schedule and counters.

Only elementwise classes of torch.optim: stepping the parts equals stepping the complete tensors.
The step works on plain tensors that share storage with the engine's parameters. Knows no
collectives.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmdflow.config.schema import OptimizerConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.table import optimizer_kind
from spmdflow.workers.schedule import RunProgress, learning_rate


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements, a float64 scalar on device; 0 without tensors."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    tensors = list(gradients)
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64) if tensors else ()
    return torch.stack([zero, *norms]).square().sum()


def clip_(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scales gradients in place by max_norm / norm if the global norm exceeds max_norm."""
    if norm > max_norm and (tensors := list(gradients)):
        torch._foreach_mul_(tensors, max_norm / norm)


def undecayed_of(
    cfg: OptimizerConfig, num_dims: Mapping[str, int], embeddings: Collection[str]
) -> frozenset[str]:
    """Return the names of the tensors without weight decay.

    These are embeddings and tensors with fewer than two dimensions (biases, norms). None, if
    optimizer.decay_parameters is "all" or weight_decay is 0. num_dims: dimensions of each complete
    tensor by name. embeddings: names, also of tied ones.
    """
    if cfg.decay_parameters == "all" or cfg.weight_decay == 0:
        return frozenset()
    return frozenset(name for name, dims in num_dims.items() if dims < 2 or name in embeddings)


def split_groups(
    parameters: Sequence[nn.Parameter], undecayed: Collection[Tensor]
) -> list[dict[str, Any]]:
    """Return parameter groups for torch.optim: the others, then `undecayed` with weight_decay 0.

    A group without parameters is omitted. The order of parameters is preserved.
    """
    spared = {id(parameter) for parameter in undecayed}
    decayed = []
    for parameter in parameters:
        if id(parameter) not in spared:
            decayed.append(parameter)
    others = []
    for parameter in parameters:
        if id(parameter) in spared:
            others.append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    result = []
    for group in groups:
        if group["params"]:
            result.append(group)
    return result


class Scheduled:
    """The state that every optimizer has: the steps done, and the learning rate of the next one."""

    def __init__(self, cfg: OptimizerConfig, total_steps: int) -> None:
        """total_steps: planned for the whole run, unless the settings state the number. ConfigError
        if it is zero and the schedule ends with it."""
        total_steps = cfg.total_steps or total_steps
        if cfg.schedule != "constant" and total_steps < 1:
            where = f"optimizer.schedule {cfg.schedule}"
            got = f"{total_steps} optimizer steps in total"
            do = "set total_steps or choose the constant schedule"
            raise ConfigError.of(where, got, "at least 1, because it ends with them", do)
        self.cfg = cfg
        self.total_steps = total_steps
        self.steps_done = 0
        self.nonfinite_in_a_row = 0
        """Steps skipped in a row because their gradients were not finite."""
        self.last_lr: float | None = None
        """The rate of the last train step. None: that of the schedule."""
        self.progress = RunProgress()
        """The position of the next step in the run. Unused with optimizer.total_steps."""

    @property
    def next_lr(self) -> float:
        """Learning rate that the next step will use, by `learning_rate`.

        With optimizer.total_steps, or while the run's length is unknown, its position is the number
        of steps done, otherwise that of `progress`.
        """
        progress = self.progress
        if self.cfg.total_steps or progress.num_steps == 0:
            return learning_rate(self.cfg, self.steps_done, self.total_steps)
        position = progress.position_of(self.steps_done)
        return learning_rate(self.cfg, self.steps_done, progress.total, position=position)

    def mark_restored(self, steps_done: int) -> None:
        """Called after weights and moments were overwritten with those after this number of
        steps."""
        self.steps_done = steps_done

    def schedule_state(self) -> dict[str, Any]:
        """State for a checkpoint in addition to the number of steps: JSON data, equal on every
        rank."""
        return self.progress.state(self.steps_done) | {
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "last_lr": self.last_lr,
        }

    def load_schedule(self, state: Mapping[str, Any]) -> None:
        """Restore what `schedule_state` returned: progress, nonfinite_in_a_row and last_lr.

        Called before `mark_restored`. {} (an older checkpoint) sets the initial values.
        """
        self.progress.load_state(state)
        self.nonfinite_in_a_row = int(state.get("nonfinite_in_a_row", 0))
        self.last_lr = state.get("last_lr")


class TorchOptimizer(Scheduled):
    """A class of torch.optim whose state is allocated from the start, so that memory is known and
    checkpoints always have the same tensors."""

    inner: torch.optim.Optimizer
    """The torch optimizer that has this rank's state."""
    moment_names: tuple[str, ...] = ()
    """Torch's names of its state per element, such as exp_avg and exp_avg_sq."""

    @property
    def torch_class(self) -> type[torch.optim.Optimizer]:
        """The class that the settings name."""
        optimizer_class: type[torch.optim.Optimizer] = getattr(torch.optim, self.cfg.name)
        return optimizer_class

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class, from the settings; only those that its signature has.

        The settings' betas are passed under the names that the class uses, and fused=True if it is
        supported.
        """
        cfg = self.cfg
        kind = optimizer_kind(self.cfg.name)
        wanted = {"betas": tuple(cfg.betas), kind.first: cfg.betas[0], kind.second: cfg.betas[1]}
        wanted |= {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
        wanted |= {"fused": True} if kind.fused else {}
        known = inspect.signature(self.torch_class).parameters
        result = {}
        for name, value in wanted.items():
            if name in known:
                result[name] = value
        return result

    def use(self, inner: torch.optim.Optimizer) -> None:
        """Use this optimizer of torch_class, which has not stepped, and allocate its state.

        Sets self.inner and self.moment_names. The moments of each parameter get their values before
        the first step.
        """
        self.inner = inner
        parameters = []
        for group in inner.param_groups:
            for p in group["params"]:
                parameters.append(p)
        if not parameters:
            return
        device = parameters[0].device
        first = self._probe(0, device)
        later = self._probe(1, device)
        self.moment_names = tuple(name for name, value in later.items() if value.ndim)
        for parameter in parameters:
            state = {name: value.clone() for name, value in first.items() if not value.ndim}
            for name in self.moment_names:  # SGD has none before its first step: it adds to zero
                value = float(first[name][0]) if name in first else 0.0
                state[name] = torch.full_like(parameter.detach(), value)
            inner.state[parameter] = state

    def moments(self) -> list[Tensor]:
        """Return the live moments of all tensors in one list."""
        states = self.inner.state.values()
        result = []
        for state in states:
            for moment in self.moment_names:
                result.append(state[moment])
        return result

    def moments_at(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the live moments of one parameter by name; {} if another rank steps it."""
        state = self.inner.state.get(parameter, {})
        result = {}
        for moment in self.moment_names:
            if state:
                result[moment] = state[moment]
        return result

    def mark_restored(self, steps_done: int) -> None:
        """Set the number of steps done, and the counters of every parameter's state to match it.

        Called after weights and moments were overwritten. Counters other than "step" are computed
        by replaying the steps on a small tensor (`_probe`).
        """
        super().mark_restored(steps_done)
        for parameter, state in self.inner.state.items():
            if state.keys() - {"step", *self.moment_names}:
                counters = self._probe(steps_done, parameter.device)
            else:
                counters = {"step": torch.tensor(steps_done)}
            break
        for state in self.inner.state.values():
            for name in state.keys() - {*self.moment_names}:
                state[name] = counters[name].to(state[name], copy=True)

    def _probe(self, steps: int, device: torch.device) -> dict[str, Tensor]:
        """Return the state of a two-element tensor after this many steps with zero gradient.

        {name: moment (2,) or scalar counter}. The learning rates are those of the schedule, except
        that the last step uses last_lr if it is known. 0 steps: the state before the first.
        """
        probe = nn.Parameter(torch.zeros(2, device=device))
        probe.grad = torch.zeros_like(probe)
        optimizer: Any = self.torch_class([probe], **self.arguments)
        (group,) = optimizer.param_groups
        group["lr"] = learning_rate(self.cfg, 0, self.total_steps)
        lists = len(inspect.signature(optimizer._init_group).parameters) - 1
        optimizer._init_group(group, *([] for _ in range(lists)))
        for step in range(steps):
            group["lr"] = learning_rate(self.cfg, step, self.total_steps)
            if step == steps - 1 and self.last_lr is not None:
                group["lr"] = self.last_lr  # the only rate that a counter rests on (ASGD's eta)
            optimizer.step()
        state = optimizer.state[probe].items()
        result = {}
        for name, value in state:
            if isinstance(value, Tensor):
                result[name] = value
        return result


class ShardedOptimizer(TorchOptimizer):
    """A class of torch.optim over named float32 shards, which may be empty on some ranks."""

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        cfg: OptimizerConfig,
        total_steps: int,
        *,
        undecayed: Collection[str] = (),
    ) -> None:
        """undecayed: names of the shards without weight decay."""
        super().__init__(cfg, total_steps)
        self._parameters = {name: nn.Parameter(shard.detach()) for name, shard in shards.items()}
        every = list(self._parameters.values())
        spared = [self._parameters[name] for name in undecayed]
        self._stepper = self._stepper_of(
            split_groups([p for p in every if p.numel()] or every, spared)
        )
        self.use(getattr(self._stepper, "optim", self._stepper))

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the shards in place from their gradients, at the rate next_lr, and count the step.

        gradients: by name. A shard without a gradient does not change.
        """
        for group in self._stepper.param_groups:
            group["lr"] = self.next_lr
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        self._stepper.step()
        self._stepper.zero_grad()
        self.steps_done += 1

    def moments_of(self, name: str) -> dict[str, Tensor]:
        """`moments_at` of the tensor of that name."""
        return self.moments_at(self._parameters[name])

    def _stepper_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of all parameters; its `optim`, if it has one, holds this rank's state."""
        return self.torch_class(groups, **self.arguments)
