"""The registry of advantage estimators: `@advantage("name")` makes one known to a run.

An estimator is a function `(samples, cfg) -> (advantages, returns)`, both (B, R), in float64. A
script adds its own with the decorator at module level; every rank imports the script, so the name
is known everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.group import RowGroups
from spmdflow.errors import ConfigError
from spmdflow.objectives.reduction import Reduce


@dataclass(frozen=True)
class Samples:
    """What an estimator is given: the rows of one rank."""

    columns: Mapping[str, Tensor]
    """By name: response-shaped (B, R), padded with 0, or dense (B, ...); numbers are float64. A
    row that failed has zeros."""
    mask: Tensor
    """(B, R) bool: True where the policy chose the token; all False for a row that failed."""
    groups: RowGroups
    """Which rows are samples of one prompt; sums over them cross ranks and leave out rows that
    failed."""
    reduce: Reduce
    """Sums over the ranks."""

    @property
    def rewards(self) -> Tensor:
        """(B, R) token-level rewards, less the KL to the reference if it has a weight."""
        return self.columns["token_level_rewards"]

    @property
    def scores(self) -> Tensor:
        """(B,) sum of each row's rewards, holes included."""
        return self.rewards.sum(-1)

    def spread(self, x: Tensor) -> Tensor:
        """(B,) -> (B, R): each row's number at every token that the policy chose, else 0."""
        return x[:, None] * self.mask


Estimate = Callable[[Samples, AdvantageConfig], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Estimator:
    """One entry of the registry."""

    estimate: Estimate
    reads: tuple[str, ...]
    """Columns it needs besides token_level_rewards and response_mask."""
    groups: bool
    """Whether a row is compared with the other samples of its prompt."""


_REGISTRY: dict[str, Estimator] = {}


def advantage(
    name: str, *, reads: Iterable[str] = (), groups: bool = False
) -> Callable[[Estimate], Estimate]:
    """Register an estimator under a name; the last one of a module's own wins.

    groups: it compares a row with the other samples of its prompt; a row that the others' failures
    left alone then has advantage 0. ConfigError if the name belongs to a function of another
    module.
    """

    def add(estimate: Estimate) -> Estimate:
        taken = _REGISTRY.get(name)
        if taken is not None and taken.estimate.__module__ != estimate.__module__:
            raise ConfigError(
                f"advantage estimator {name!r}: got a definition in {estimate.__module__}, "
                f"expected a name that is not taken by {taken.estimate.__module__}; choose another"
            )
        _REGISTRY[name] = Estimator(estimate, tuple(reads), groups)
        return estimate

    return add


def estimator_of(name: str) -> Estimator:
    """The estimator of that name; ConfigError naming the choices."""
    if name not in _REGISTRY:
        raise ConfigError(
            f"advantage.estimator: got {name!r}; expected one of {sorted(_REGISTRY)}; choose one "
            f"or add yours with @advantage({name!r})"
        )
    return _REGISTRY[name]
