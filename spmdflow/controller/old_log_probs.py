"""Where the log-probabilities of before an update come from: `actor.update.old_log_probs`.

| source | `actor.compute_log_prob` | the update |
|---|---|---|
| recompute | runs a forward and writes old_log_probs | compares with old_log_probs |
| rollout | runs nothing; answers with rollout_log_probs | compares with the generator's |
| own | runs nothing and writes nothing | compares with the log-probs of its own forward |

`auto` decides by settings, by the size of the batch and by what earlier steps have measured:

- own, if an update of the batch is one optimizer step and no setting reads the column before it;
- otherwise rollout, if the mismatch is small enough and what reads the column allows it;
- otherwise recompute.

The mismatch is small enough if, in the last step that measured it, the mean |log-prob difference|
of generator and trainer was at most a hundredth of loss.clip_ratio and the largest at most half of
it. Then the difference alone never makes the loss clip a token, and shifts the mean ratio by less
than a hundredth of what one update may change. `compute_log_prob` measures it, and without that
call each update in its first optimizer step, before the weights change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmdflow.config.leaf import parts_of
from spmdflow.config.objective import (
    AdvantageConfig,
    PolicyUpdateConfig,
    readers_of_old_log_probs,
)
from spmdflow.config.resolve import Choice, choices_text
from spmdflow.config.schema import AUTO
from spmdflow.controller.assignment import Target, takes_one_step
from spmdflow.controller.batch import Batch
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.objectives.estimator import ESTIMATORS
from spmdflow.tracking.guard import SKIP, Guards
from spmdflow.worker_api.register import MethodSpec

logger = logging.getLogger(__name__)

RECOMPUTE = "recompute"
ROLLOUT = "rollout"
OWN = "own"

OLD_LOG_PROBS = "old_log_probs"
MISMATCH = ("rollout/drift", "rollout/drift_max")
"""Metrics that measure how much the generator's log-probs differ from the trainer's."""
MOST_MEAN = 0.01
MOST_MAX = 0.5
"""Largest of each, as a share of loss.clip_ratio."""
_REPORTED = {"actor/entropy", *MISMATCH}
"""Metrics that `compute_log_prob` reports before the update."""


def readers_of(cfg: Any) -> dict[str, bool]:
    """Return what reads old_log_probs before the update -> whether rollout_log_probs may serve.

    Names settings, estimators and guards, as text for messages. Estimators that read the column,
    and guards with `skip` on metrics that `compute_log_prob` reports, do not allow that; settings
    decide in `readers_of_old_log_probs`. ConfigError if a policy has old_log_probs=own and there is
    a reader.
    """
    readers = readers_of_old_log_probs(cfg)
    for key, advantage in parts_of(cfg, AdvantageConfig):
        if OLD_LOG_PROBS in ESTIMATORS.find(advantage.estimator, key=f"{key}.estimator").reads:
            readers[f"{key}.estimator={advantage.estimator}"] = False
    for guard in Guards(cfg.run.guards).guards:
        if guard.action == SKIP and guard.name in _REPORTED:
            readers[f"the guard of {guard.name}"] = False
    for key, update in parts_of(cfg, PolicyUpdateConfig):
        if update.old_log_probs == OWN and readers:
            where = f"{key}.old_log_probs"
            got = f"own, and {', '.join(readers)}, which reads them before the update"
            raise ConfigError.of(where, got, "log-probs that can be read", f"set {where}=auto")
    return readers


class _Omission(NamedTuple):
    """A call of `compute_log_prob` that was not made."""

    ids: Ids
    """Its rows, ascending."""
    num_updates: int
    """Updates of the model before it."""


class OldLogProbs:
    """Decides for each model where its old log-probs come from, and says so."""

    def __init__(self, readers: Mapping[str, bool] | None = None) -> None:
        """readers: of `readers_of`."""
        self.mismatch: Sequence[float] = ()
        """Mean and largest, as they were measured last; empty: never."""
        self.choices: dict[str, Choice] = {}
        """What was chosen last, by model."""
        self._readers = dict(readers or {})
        self._omitted: dict[str, list[_Omission]] = {}

    def end_step(self, metrics: Mapping[str, float], num_updates: Mapping[str, int]) -> None:
        """Keep the mismatch that a step measured; forget omitted calls before the latest update.

        metrics: of the step; without a mismatch the last one stays. num_updates: of each model so
        far.
        """
        measured = [metrics[name] for name in MISMATCH if name in metrics]
        self.mismatch = measured or self.mismatch
        for model, omissions in self._omitted.items():
            current = num_updates.get(model, 0)
            self._omitted[model] = [each for each in omissions if each.num_updates == current]

    def source(self, target: Target, spec: MethodSpec, batch: Batch) -> str:
        """Return where `compute_log_prob` takes its values from: recompute, rollout or own.

        This is the setting, unless it is auto. auto: own if nothing reads the values before the
        update and the update is one optimizer step; otherwise rollout, unless `_why_not_rollout`
        objects; otherwise recompute. Remembers the choice of auto, and logs it if it is new.
        """
        setting = _setting_of(target)
        if setting != AUTO:
            return setting
        if not self._readers and takes_one_step(
            batch.parents, target.settings.update, batch.shares
        ):
            why = "a batch is one optimizer step and no setting reads them before it"
            return self._choose(target, OWN, why)
        why_not = self._why_not_rollout(target, spec, batch)
        if why_not:
            return self._choose(target, RECOMPUTE, why_not)
        mean, largest = _bounds(target)
        why = f"generator and trainer differ by at most {mean:g}, and {largest:g} at a token"
        return self._choose(target, ROLLOUT, why)

    def omit(self, target: Target, batch: Batch, num_updates: int) -> None:
        """Remember the rows of a `compute_log_prob` that was not run (own)."""
        omission = _Omission(np.unique(batch.ids), num_updates)
        self._omitted.setdefault(target.name, []).append(omission)

    def replacements(
        self, target: Target, spec: MethodSpec, batch: Batch, num_updates: int
    ) -> dict[str, str]:
        """Return column that an update reads -> column that it gets as well, or in its place.

        A pair of spec.instead is returned if the batch's column is the generator's (rollout), or if
        the batch lacks it and the update may compare with its own forward (own). Empty if the rows
        have log-probs of the trainer. ColumnError if the update would compare with its own forward
        although it is not the first optimizer step on these rows.
        """
        replacements = {}
        for name, other in spec.instead.items():
            if name in batch.columns:
                if self._is_from_generator(target, batch, name, other):
                    replacements[name] = other
            elif self._is_first_step(target, batch, num_updates):
                replacements[name] = other
        return replacements

    def why_missing(self, column: str) -> str:
        """What to change if a batch lacks a column that was not computed; empty: nothing."""
        if column != OLD_LOG_PROBS:
            return ""
        return self._advice()

    def omitted_metrics(self) -> dict[str, str]:
        """Return metrics that only the update reports -> what to change to have them before it.

        Empty if no call of `compute_log_prob` was omitted.
        """
        advice = self._advice()
        if not advice:
            return {}
        return dict.fromkeys(_REPORTED, advice)

    def _advice(self) -> str:
        """Return what to change if a result of an omitted call is needed; empty without one."""
        for model in self._omitted:
            key = f"{model}.update.old_log_probs"
            return (
                f"compute_log_prob computes nothing under {key}=own, because the update's forward "
                f"computes the log-probs; set {key}=recompute"
            )
        return ""

    def _is_from_generator(self, target: Target, batch: Batch, name: str, other: str) -> bool:
        """Whether a column is the generator's column `other` (rollout)."""
        if _setting_of(target) == RECOMPUTE or other not in batch.columns:
            return False
        return batch.column(name).equals(batch.column(other))

    def _is_first_step(self, target: Target, batch: Batch, num_updates: int) -> bool:
        """Return whether an update may compare with the log-probs of its own forward.

        False if `compute_log_prob` was not omitted for one of its rows. True if it was for all, the
        update is one optimizer step, and the policy has not been updated since. Otherwise raises
        ColumnError.
        """
        before = self._updates_before(target.name, batch.ids)
        if (before < 0).any():
            return False
        is_one_step = takes_one_step(batch.parents, target.settings.update, batch.shares)
        if is_one_step and (before == num_updates).all():
            return True
        key = f"{target.name}.update.old_log_probs"
        got = (
            "a second optimizer step on the rows of one compute_log_prob; the old log-probs would "
        )
        got += "be those of the step's own forward, and its ratio always 1"
        do = f"set {key}=recompute, or update.mini_batch_size to the rows of a batch"
        raise ColumnError.of(f"{target.name}, {key}=own", got, "one optimizer step", do)

    def _updates_before(self, model: str, ids: Ids) -> np.ndarray:
        """Return (B,) int64: how many updates the model had when the call on each row was omitted.

        -1: no call on the row was omitted. If several were, the last one counts.
        """
        before = np.full(len(ids), -1, dtype=np.int64)
        for omission in reversed(self._omitted.get(model, [])):
            is_in_it = np.isin(ids, omission.ids) & (before < 0)
            before[is_in_it] = omission.num_updates
        return before

    def _why_not_rollout(self, target: Target, spec: MethodSpec, batch: Batch) -> str:
        """Return why the generator's log-probs cannot be taken; empty if they can.

        They cannot if a reader does not allow it, if the batch lacks them, if the mismatch was
        never measured, or if its mean is above 0.01 or its maximum above 0.5 times loss.clip_ratio
        (or nan).
        """
        for reader, allows_rollout in self._readers.items():
            if not allows_rollout:
                return f"{reader} reads them before the update"
        for other in spec.instead.values():
            if other not in batch.columns:
                return f"the batch has no {other}"
        bounds = _bounds(target)
        if len(self.mismatch) < len(bounds):
            return "the generator/trainer mismatch is not measured yet"
        for measured, most in zip(self.mismatch, bounds, strict=True):
            if not measured <= most:
                return (
                    f"generator and trainer differ by more than {bounds[0]:g}, or by more than "
                    f"{bounds[1]:g} at a token"
                )
        return ""

    def _choose(self, target: Target, source: str, why: str) -> str:
        """Remember the source and its reason for a model, and return the source.

        Logs it if it is the first choice or differs from the last one.
        """
        choice = Choice(f"{target.name}.update.old_log_probs", source, why)
        if self.choices.get(target.name) != choice:
            self.choices[target.name] = choice
            logger.info("%s", choices_text([choice]))
        return source


def _setting_of(target: Target) -> str:
    """actor.update.old_log_probs; settings without it recompute."""
    return getattr(getattr(target.settings, "update", None), "old_log_probs", RECOMPUTE)


def _bounds(target: Target) -> tuple[float, float]:
    """Bounds on the mean and the largest mismatch up to which the generator's log-probs serve."""
    clip = target.settings.loss.clip_ratio
    return MOST_MEAN * clip, MOST_MAX * clip
