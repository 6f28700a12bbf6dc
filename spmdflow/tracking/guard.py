"""`Guards`: which conditions of run.guards hold for a step's metrics, and what to check then.

Pure: knows only numbers by name. controller/guarding.py acts on the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

from spmdflow.config.guard import SKIP, Guard, guard_of

FEWEST = 5
"""Earlier values that a median needs."""
_MOST_VALUES = 512
"""Most stored values of a metric. At this number every second one is dropped, then and later."""
_ADVICE = {
    "eval/": "read samples.jsonl and the rewards of the previous steps; lower actor.optimizer.lr",
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
"""What to check, by prefix of the metric's name."""


class Trip(NamedTuple):
    """A guard whose condition holds."""

    guard: Guard
    value: float
    limit: float
    base: float | None
    """The best or median earlier value from which the limit is computed."""
    times: int = 1
    """How often the condition has held in this run, including this time."""

    @property
    def got(self) -> str:
        """Return the metric's name and value, and the base of the limit if there is one.

        "eval/accuracy 0.12 (best so far 0.61)".
        """
        if self.base is None:
            base = ""
        else:
            base = f" ({self.guard.base} so far {self.base:.4g})"
        return f"{self.guard.name} {self.value:.4g}{base}"

    @property
    def expected(self) -> str:
        """The allowed range, and the guard that sets it."""
        side = "at most" if self.guard.is_above else "at least"
        return f"{side} {self.limit:.4g}, by '{self.guard.text}'"

    @property
    def advice(self) -> str:
        """Return what to check and which setting to change.

        This is the entry of `_ADVICE` with the longest prefix of the metric's name. A general text
        if no entry is a prefix of the metric's name.
        """
        fitting = []
        for start in _ADVICE:
            if self.guard.name.startswith(start):
                fitting.append(start)
        if fitting:
            return _ADVICE[max(fitting, key=len)]
        return "check the previous steps in metrics.jsonl"

    @property
    def is_reported(self) -> bool:
        """Whether to log it, which happens the first, second, fourth, eighth, ... time."""
        return self.times & (self.times - 1) == 0


class Guards:
    """The conditions of run.guards, and the earlier values of each of their metrics."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.guards = [guard_of(text) for text in texts]
        self._histories = {each.name: _MetricHistory() for each in self.guards}
        self._times: dict[str, int] = {}

    def trips(self, metrics: Mapping[str, float], *, skipping: bool) -> list[Trip]:
        """Return a `Trip` for each guard whose condition is true for these metrics, in order.

        skipping: check only guards with the action skip; otherwise only the others. A guard whose
        metric is missing is skipped. Increments the count of each that trips, which is in the
        result; does not add the metrics to the earlier values (`learn`).
        """
        trips = []
        for each in self.guards:
            trip = None
            if each.name in metrics and (each.action == SKIP) == skipping:
                trip = self._histories[each.name].trip(each, metrics[each.name])
            if trip is not None:
                times = self._times[each.text] = self._times.get(each.text, 0) + 1
                trips.append(trip._replace(times=times))
        return trips

    def learn(self, metrics: Mapping[str, float]) -> None:
        """Add the finite metrics of a finished step to the earlier values that guards use."""
        for name, seen in self._histories.items():
            if isfinite(metrics.get(name, inf)):
                seen.add(metrics[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run continues, as data for JSON.

        "seen": metric -> its earlier values, if it has any. "times": guard's text -> how often it
        tripped.
        """
        seen = {}
        for name, each in self._histories.items():
            if each.count:
                seen[name] = each.to_plain()
        return {"seen": seen, "times": dict(self._times)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; skips metrics that no guard uses any more."""
        self._times = dict(state["times"])
        for name in self._histories.keys() & state["seen"].keys():
            self._histories[name] = _MetricHistory(*state["seen"][name])


class _MetricHistory:
    """Earlier values of one metric: count, extremes, and a subsample for the median."""

    def __init__(
        self,
        count: int = 0,
        lowest: float = inf,
        highest: float = -inf,
        values: Sequence[float] = (),
        every: int = 1,
    ) -> None:
        """values: every `every`-th value so far."""
        self.count = count
        self._lowest = lowest
        self._highest = highest
        self._values = list(values)
        self._every = every

    def to_plain(self) -> list[Any]:
        """The arguments of the constructor, as data for JSON."""
        return [self.count, self._lowest, self._highest, list(self._values), self._every]

    def add(self, value: float) -> None:
        """Add the value of a step that has ended.

        Updates the count, the minimum, the maximum and the values from which the median is
        computed. Only every `every`-th value is stored for the median. At 512 stored values every
        second one is dropped, and `every` doubles.
        """
        self._lowest = min(self._lowest, value)
        self._highest = max(self._highest, value)
        if self.count % self._every == 0:
            self._values.append(value)
        self.count += 1
        if len(self._values) == _MOST_VALUES:
            self._values = self._values[::2]
            self._every = 2 * self._every

    def trip(self, guard: Guard, value: float) -> Trip | None:
        """Return a `Trip` if this value violates the guard's limit, otherwise None.

        limit = factor * base + more, where base is the median (at least 5 earlier values) or the
        best (the lowest for ">", otherwise the highest) of the earlier values. If the guard needs a
        base and there is none, or the base itself violates the limit (0.5 * best of a negative
        best), only nan and infinity trip. Changes nothing.
        """
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
