"""Calls that are delayed until something reads their columns, and what replaces those never made.

`actor.compute_log_prob` is such a call: the update computes these log-probs in its own forward.
With `actor.update.old_log_probs`

- recompute: the call is made where the script has it;
- rollout: it is never made; old_log_probs are the generator's, rollout_log_probs;
- auto: it is delayed. It is made as soon as something reads its column, or before a call that may
  change the model. An update of all its rows in one optimizer step does not need it: the old
  log-probs are those of the update's own forward. An update of several steps uses the generator's
  if these are certified, and so does a map function that allows it (`MapSpec.instead`); otherwise
  the call is made.

Certified: in the last step that measured it, the mean |log-prob difference| of generator and
trainer was at most a hundredth of loss.clip_ratio and the largest at most half of it. Then the
difference alone never makes the loss clip a token, and shifts the mean ratio by less than a
hundredth of what one update may change. `compute_log_prob` measures it first, then each update in
its first optimizer step, before the weights change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from spmdflow.config.auto import Choice, choices_text
from spmdflow.config.schema import AUTO
from spmdflow.controller.assignment import Target, takes_one_step
from spmdflow.controller.batch import Batch
from spmdflow.controller.result import ColumnRef, Result, RowResult
from spmdflow.errors import ColumnError
from spmdflow.transfer.register import MethodSpec

logger = logging.getLogger(__name__)

RECOMPUTE = "recompute"
ROLLOUT = "rollout"
OWN = "of the update's own forward"
DRIFT = ("rollout/drift", "rollout/drift_max")
"""Metrics that certify."""
MOST_MEAN = 0.01
MOST_MAX = 0.5
"""Largest of each, as a share of loss.clip_ratio."""


class Waiting:
    """The delayed calls of a step, by model, and what `auto` chose."""

    def __init__(self) -> None:
        self.drift: Sequence[float] = ()
        """Mean and largest gap, as they were measured last; empty: never."""
        self.choices: dict[str, Choice] = {}
        """What auto means, by model."""
        self._calls: dict[str, list[RowResult]] = {}
        self._targets: dict[str, Target] = {}
        self._served: WeakKeyDictionary[RowResult, str] = WeakKeyDictionary()
        self.updates: WeakKeyDictionary[RowResult, Result] = WeakKeyDictionary()
        """For calls that are never made: the update's result, which reports their metrics."""

    def learn(self, metrics: Mapping[str, float]) -> None:
        """Take over what a step measured."""
        self.drift = [metrics[name] for name in DRIFT if name in metrics] or self.drift

    def is_worthwhile(self, target: Target, spec: MethodSpec, batch: Batch) -> bool:
        """Whether to delay a call because an update of these rows may not need it."""
        if not spec.may_wait or _mode_of(target) != AUTO:
            return False
        update = target.settings.update
        lacks = self._lacks(target, spec.instead, batch)
        if takes_one_step(batch.parents, update) or lacks is None:
            return True
        self._say(target, RECOMPUTE, lacks)
        return False

    def add(self, target: Target, result: RowResult, send: Callable[[], object]) -> None:
        """A call begins to wait; send makes it."""

        def make(reader: str, why: str) -> None:
            result.make = None
            self._calls[target.name].remove(result)
            self._say(target, RECOMPUTE, why or f"{reader} reads them before the update")
            send()

        result.make = make
        self._targets[target.name] = target
        self._calls.setdefault(target.name, []).append(result)

    def make(self, name: str, why: str) -> None:
        """Make the calls that wait for a model."""
        for result in list(self._calls.get(name, ())):
            result.be_made(name, why)

    def make_all(self) -> None:
        """Make the calls that still wait when the step ends, for the metrics that they report."""
        for name in self._calls:
            self.make(name, "no update of the step learns from all their rows")

    def offer(self, target: Target, spec: MethodSpec, batch: Batch) -> tuple[Batch, dict[str, str]]:
        """The rows to give to an update, and column -> replacement.

        A replaced column is left out if the update's own forward computes it, else it holds the
        generator's values.
        """
        found: dict[str, str] = {}
        for name, other in spec.instead.items() if spec.minibatches else ():
            if name in batch.columns:
                choice = self._choice(target, spec, batch, name)
            else:
                choice = ""
            if choice:
                found[name] = other
                if choice == ROLLOUT:
                    batch = _with_other(batch, name, other)
                else:
                    batch = batch.drop(name)
        return batch, found

    def offer_map(self, batch: Batch, instead: Mapping[str, str]) -> Batch:
        """The rows for a map function, with allowed replacements for columns of delayed calls."""
        for name, other in instead.items():
            made_by = batch.column(name).result if name in batch.columns else None
            for model, calls in self._calls.items():
                if made_by in calls and not self._lacks(self._targets[model], instead, batch):
                    batch = _with_other(batch, name, other)
        return batch

    def serve(
        self, target: Target, spec: MethodSpec, batch: Batch, names: Iterable[str]
    ) -> list[RowResult]:
        """An update does not need `names`: their calls are never made, later reads are errors.

        Returns the results that these calls would have made.
        """
        found = []
        for name in names:
            result = batch.column(name).result
            choice = self._choice(target, spec, batch, name)
            if isinstance(result, RowResult) and result in self._calls.get(target.name, ()):
                self._calls[target.name].remove(result)
                result.make = partial(_refuse, target.name)
                self._served[result] = choice
                found.append(result)
                mean, most = _bounds(target)
                why = f"generator and trainer differ by at most {mean:g}, at a token by {most:g}"
                if choice == OWN:
                    why = "a batch is one optimizer step, nothing reads them before it"
                self._say(target, choice, why)
        return found

    def _choice(self, target: Target, spec: MethodSpec, batch: Batch, name: str) -> str:
        """What replaces a column of a delayed call; empty: nothing."""
        ref = batch.column(name)
        other = spec.instead[name]
        if _mode_of(target) == ROLLOUT and other in batch.columns:
            if ref.equals(batch.column(other)):
                return ROLLOUT
            return ""
        if not isinstance(ref.result, RowResult):
            return ""
        if ref.result not in self._calls.get(target.name, ()):
            if self._served.get(ref.result) == ROLLOUT:
                return ROLLOUT
            return ""
        if takes_one_step(batch.parents, target.settings.update) and _has_all(ref, ref.result):
            return OWN
        if self._lacks(target, spec.instead, batch):
            return ""
        return ROLLOUT

    def _lacks(self, target: Target, instead: Mapping[str, str], batch: Batch) -> str | None:
        """Why the generator's columns cannot be used; None: they can."""
        if not all(other in batch.columns for other in instead.values()):
            return f"a batch is several optimizer steps and has no {', '.join(instead.values())}"
        bounds = _bounds(target)
        if len(self.drift) < len(bounds):
            return "a batch is several optimizer steps, generator and trainer are not compared yet"
        if not all(found <= most for found, most in zip(self.drift, bounds, strict=True)):
            return (
                f"a batch is several optimizer steps, generator and trainer differ by more than "
                f"{bounds[0]:g}, or at a token than {bounds[1]:g}"
            )
        return None

    def _say(self, target: Target, value: str, why: str) -> None:
        """Log a choice when it is first made and when it changes."""
        choice = Choice(f"{target.name}.update.old_log_probs", value, why)
        if self.choices.get(target.name) != choice:
            self.choices[target.name] = choice
            logger.info("%s", choices_text([choice]))


def is_rollout(target: Target, spec: MethodSpec) -> bool:
    """Whether the generator's columns are those of a call that is never made."""
    return spec.may_wait and _mode_of(target) == ROLLOUT


def _mode_of(target: Target) -> str:
    return getattr(getattr(target.settings, "update", None), "old_log_probs", RECOMPUTE)


def _bounds(target: Target) -> tuple[float, float]:
    """Bounds on the mean and the largest gap up to which the generator's log-probs are used."""
    clip = target.settings.loss.clip_ratio
    return MOST_MEAN * clip, MOST_MAX * clip


def _with_other(batch: Batch, name: str, other: str) -> Batch:
    """The batch with another column in the place of one."""
    return batch.drop(name) | batch.only(other).rename(**{name: other})


def _has_all(ref: ColumnRef, result: RowResult) -> bool:
    """Whether a column's rows are all rows of its result: others may be updated later."""
    rows = np.unique(np.concatenate(list(result.answer.values())))
    return np.array_equal(np.sort(ref.ids), rows)


def _refuse(name: str, reader: str, why: str) -> None:
    got = "old_log_probs of rows that an update has learnt from since"
    expected = "them to be read before, as the update took those of its own forward"
    do = f"set {name}.update.old_log_probs=recompute"
    raise ColumnError.of(reader, got, expected, do)
