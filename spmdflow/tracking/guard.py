"""`Guards`: which conditions of run.guards hold for a step's metrics, and what to look at then.

Pure. Knows numbers by name; what is done about them is the controller's (controller/guarding.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

from spmdflow.config.guard import SKIP, Guard, guard_of

FEWEST = 5
"""Values that a median needs."""
_MOST_VALUES = 512
"""Kept of a metric; then every second one is dropped, and every second new one is left out."""
_ADVICE = {
    "eval/": "read samples.jsonl and the rewards of the steps before; lower actor.optimizer.lr",
    "reward/": "read samples.jsonl; lower actor.optimizer.lr, or correct the reward function",
    "actor/entropy": "read samples.jsonl: are the responses all alike? lower actor.optimizer.lr",
    "actor/": "read samples.jsonl; lower actor.optimizer.lr or actor.update.num_epochs, or raise "
    "a kl_coef",
    "critic/": "lower critic.optimizer.lr, or its epochs",
    "rollout/drift": "compare actor.rollout.dtype with actor.model.dtype, and check the weight "
    "sync (actor.rollout.verify_every=1)",
    "perf/host": "the rank is perf/host_rank; look for lists that grow in the script, its worker "
    "classes or the reward function",
}
"""What to look at, by how the metric begins."""


class Trip(NamedTuple):
    """A guard whose condition holds."""

    guard: Guard
    value: float
    limit: float
    base: float | None
    """The best or median value that the limit comes from."""
    times: int = 1
    """How often it has held in this run, this time included."""

    @property
    def got(self) -> str:
        """The number, and what it is held against."""
        if self.base is None:
            base = ""
        else:
            base = f" ({self.guard.base} so far {self.base:.4g})"
        return f"{self.guard.name} {self.value:.4g}{base}"

    @property
    def expected(self) -> str:
        """The other side of the limit."""
        side = "at most" if self.guard.is_above else "at least"
        return f"{side} {self.limit:.4g}, by '{self.guard.text}'"

    @property
    def advice(self) -> str:
        """What to look at."""
        fitting = []
        for start in _ADVICE:
            if self.guard.name.startswith(start):
                fitting.append(start)
        if fitting:
            return _ADVICE[max(fitting, key=len)]
        return "look at metrics.jsonl before it"

    @property
    def is_told(self) -> bool:
        """Whether to say so: the first, second, fourth, eighth, ... time."""
        return self.times & (self.times - 1) == 0


class Guards:
    """The conditions, and of each of their metrics the best and the median value so far."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.guards = [guard_of(text) for text in texts]
        self._seen = {each.name: _Seen() for each in self.guards}
        self._times: dict[str, int] = {}

    def trips(self, metrics: Mapping[str, float], *, skipping: bool) -> list[Trip]:
        """The guards that hold now: those with the action skip, or the others."""
        found = []
        for each in self.guards:
            trip = None
            if each.name in metrics and (each.action == SKIP) == skipping:
                trip = self._seen[each.name].trip(each, metrics[each.name])
            if trip is not None:
                times = self._times[each.text] = self._times.get(each.text, 0) + 1
                found.append(trip._replace(times=times))
        return found

    def learn(self, metrics: Mapping[str, float]) -> None:
        """A step is over: its values become earlier ones."""
        for name, seen in self._seen.items():
            if isfinite(metrics.get(name, inf)):
                seen.add(metrics[name])

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues with."""
        seen = {}
        for name, each in self._seen.items():
            if each.count:
                seen[name] = each.to_plain()
        return {"seen": seen, "times": dict(self._times)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; metrics that no guard names any more are dropped."""
        self._times = dict(state["times"])
        for name in self._seen.keys() & state["seen"].keys():
            self._seen[name] = _Seen(*state["seen"][name])


class _Seen:
    """Earlier values of one metric."""

    def __init__(
        self,
        count: int = 0,
        lowest: float = inf,
        highest: float = -inf,
        values: Sequence[float] = (),
        every: int = 1,
    ) -> None:
        self.count = count
        self._lowest = lowest
        self._highest = highest
        self._values = list(values)
        self._every = every

    def to_plain(self) -> list[Any]:
        """The arguments of the constructor."""
        return [self.count, self._lowest, self._highest, list(self._values), self._every]

    def add(self, value: float) -> None:
        """A value of a step that is over."""
        self._lowest = min(self._lowest, value)
        self._highest = max(self._highest, value)
        if self.count % self._every == 0:
            self._values.append(value)
        self.count += 1
        if len(self._values) == _MOST_VALUES:
            self._values = self._values[::2]
            self._every = 2 * self._every

    def trip(self, guard: Guard, value: float) -> Trip | None:
        """A limit that its own best or median value exceeds (0.5 * best of a negative one) says
        nothing, nor does one without earlier values."""
        base = None
        if guard.base == "median" and self.count >= FEWEST:
            base = float(median(self._values))
        if guard.base == "best" and self.count:
            base = self._lowest if guard.is_above else self._highest
        limit = guard.limit(base or 0.0)
        if guard.base and (base is None or guard.exceeds(base, limit)):
            if isfinite(value):
                return None
            return Trip(guard, value, limit, base)
        if guard.exceeds(value, limit):
            return Trip(guard, value, limit, base)
        return None
