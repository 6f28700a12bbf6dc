"""The steps of a run, with their whole seconds, and which of them a claim may count.

A step counts if it is behind the warm-up of its start and if that start had the same devices,
models, sizes, versions and commit as the last one. Steps with evaluation or saving are apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdflow.errors import DataError
from spmdflow.tracking.reading import Record, RunFiles

WARM_UP = 10
"""Steps of each start that are not measured by default, as in the HybridFlow paper (section 8.1:
averages after a warm-up of 10 iterations)."""
_SETUP = ("device", "ranks", "nodes", "sizes", "models", "versions", "git")
"""Parts of the record of a start that must be equal for steps to count together."""
_NEEDED = {"launch", "began", "seconds", "evaluates", "saves", "trained", "dropped", "passes"}
"""What a line of throughput.jsonl has at least; other lines are skipped."""


@dataclass(frozen=True)
class MeasuredStep:
    """One finished step."""

    number: int
    launch: int
    seconds: float
    """From its beginning to the beginning of the next step; of the last step of a start, to its
    own end."""
    evaluates: bool
    saves: bool
    """Whether a checkpoint was begun in these seconds, or copied and written alongside."""
    tokens: Record
    """Of throughput.jsonl; {} in runs of earlier versions."""
    metrics: Record

    @property
    def is_plain(self) -> bool:
        """Whether it only trains."""
        return not self.evaluates and not self.saves


@dataclass(frozen=True)
class Selection:
    """Which steps of a run are measured."""

    steps: Sequence[MeasuredStep]
    """All finished steps, in order."""
    measured: Sequence[MeasuredStep]
    """Those behind the warm-up, of the last setup."""
    num_other_setup: int
    """Steps of starts with another setup."""
    num_warm_up: int
    """Steps of the warm-up, of the last setup."""
    launch: Record
    """Facts of the last start; {} in runs of earlier versions."""
    num_launches: int
    warnings: Sequence[str]


def steps_of(run: RunFiles) -> list[MeasuredStep]:
    """Return the finished steps of a run, without the evaluation before the first.

    In runs of earlier versions a step's seconds are time/step_seconds, and its saves are not known.
    """
    metrics = {}
    for record in run.metrics:
        if record["step"] > 0:
            metrics[record["step"]] = record
    records = []
    for record in run.throughput:
        if record.keys() >= _NEEDED:
            records.append(record)
    if not records:
        return [_step_of_metrics(record) for record in metrics.values()]
    steps = []
    for position, record in enumerate(records):
        following: Record = {}
        if position + 1 < len(records):
            following = records[position + 1]
        is_followed = _follows(following, record)
        seconds = float(record["seconds"])
        if is_followed:
            seconds = float(following["began"] - record["began"])
        steps.append(
            MeasuredStep(
                number=record["step"],
                launch=record["launch"],
                seconds=seconds,
                evaluates=record["evaluates"],
                saves=record["saves"] or (is_followed and following["saves"]),
                tokens=record,
                metrics=metrics.get(record["step"], {}),
            )
        )
    return steps


def _follows(following: Record, record: Record) -> bool:
    """Whether a record is of the next step of the same start."""
    if not following or following["launch"] != record["launch"]:
        return False
    return bool(following["step"] == record["step"] + 1)


def _step_of_metrics(record: Record) -> MeasuredStep:
    return MeasuredStep(
        number=record["step"],
        launch=1,
        seconds=float(record.get("time/step_seconds") or 0.0),
        evaluates="time/evaluate_seconds" in record,
        saves=False,
        tokens={},
        metrics=record,
    )


def select_steps(run: RunFiles, *, warm_up: int) -> Selection:
    """Return which steps of a run are measured, with warnings about what was not possible.

    If no step is behind the warm-up, all steps but the first of each start are measured or, if
    there are none either, all steps. Raises DataError if the run has no finished step.
    """
    run.needed_metrics()
    steps = steps_of(run)
    if not steps:
        got = "only the evaluation before the first step"
        raise DataError.of(f"report: {run.path}", got, "a finished step", "wait for the first one")
    launches: dict[int, Record] = {}
    for record in run.launches:
        if "launch" in record:
            launches[record["launch"]] = record
    last = launches.get(steps[-1].launch, {})
    alike = []
    for step in steps:
        if _has_equal_setup(launches.get(step.launch, {}), last):
            alike.append(step)
    warnings = []
    measured = _without_first(alike, warm_up)
    if not measured:
        warnings.append(_warm_up_warning(alike, warm_up))
        measured = _without_first(alike, 1) or alike
    if not run.throughput:
        warnings.append(
            "warning: RUN_DIR has no throughput.jsonl, because an earlier version wrote it: tokens "
            "are those that were generated, trained or not; run some steps with this version"
        )
    if not launches:
        warnings.append(
            "warning: RUN_DIR has no launches.jsonl, because an earlier version wrote it: devices, "
            "models and versions are not known"
        )
    return Selection(
        steps=steps,
        measured=measured,
        num_other_setup=len(steps) - len(alike),
        num_warm_up=len(alike) - len(measured),
        launch=last,
        num_launches=max(len(launches), 1),
        warnings=warnings,
    )


def _has_equal_setup(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two starts had the same devices, models, sizes, versions and commit."""
    return all(one.get(part) == other.get(part) for part in _SETUP)


def _without_first(steps: Sequence[MeasuredStep], number: int) -> list[MeasuredStep]:
    """Return the steps without the first `number` steps of each start."""
    seen: dict[int, int] = {}
    result = []
    for step in steps:
        seen[step.launch] = seen.get(step.launch, 0) + 1
        if seen[step.launch] > number:
            result.append(step)
    return result


def _warm_up_warning(steps: Sequence[MeasuredStep], warm_up: int) -> str:
    """Return the warning for a run without a step behind its warm-up."""
    starts = {step.launch for step in steps}
    used = "all steps but the first of each start count"
    if len(steps) <= len(starts):
        used = "all steps count"
    if len(starts) > 1:
        return f"warning: no start of the run has more than {warm_up} steps of warm-up; {used}"
    is_longer = "longer than" if warm_up > len(steps) else "as long as"
    return f"warning: warm-up ({warm_up} steps) is {is_longer} the run ({len(steps)}); {used}"
