"""Prediction next to measurement, after a run: RUN_DIR/prediction.json and prediction.txt.

Everything is derived from what the run recorded of its first steps. Seconds are predicted for its
calls with their rows and lengths, and compared with the measured median over the steps (without the
first step if there are more). Bytes are compared edge by edge for row transfers and sync by sync
for weights: planned, and counted by the ranks.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from spmdflow.checkpoint.run_dir import path_of
from spmdflow.errors import DataError, SpmdflowError
from spmdflow.mapping.hardware import Hardware
from spmdflow.plan.prediction import Prediction, predict
from spmdflow.plan.record import Trace
from spmdflow.plan.replay import Replay, recorded_trace
from spmdflow.plan.text import seconds_of, table, wrap_paragraph
from spmdflow.plan.weight import WeightPlan, syncs_by_step, weight_plans
from spmdflow.plan.workload import hardware_of
from spmdflow.tracking.tracker import read_lines

logger = logging.getLogger(__name__)

JSON_FILE = "prediction.json"
TEXT_FILE = "prediction.txt"
_SHOWN_EDGES = 12


class StageTime(NamedTuple):
    """Seconds of one method in a step; None if unknown."""

    stage: str
    predicted: float | None
    measured: float | None


class EdgeCount(NamedTuple):
    """Row bytes of one edge over the compared steps."""

    source: int
    destination: int
    planned: int
    counted: int


class SyncCount(NamedTuple):
    """Weight syncs to generators in the training calls of a step.

    planned and counted are bytes: expected, and reported as rollout/synced_bytes.
    """

    step: int
    syncs: int
    planned: int
    counted: int


class AttentionCount(NamedTuple):
    """What the ranks of a model that divide rows send each other for attention, an optimizer step.

    planned follows from the lengths of the rows; counted is the median of the steps.
    """

    model: str
    planned: float
    counted: float


class PhaseBytes(NamedTuple):
    """Memory of a rank in one phase: planned by part, and the fullest rank's measured peak."""

    phase: str
    """As in a plan, such as actor.build or actor.update_actor."""
    planned: float
    parts: Mapping[str, float]
    measured: int


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured seconds and bytes of a run."""

    hardware: str
    stages: tuple[StageTime, ...] = ()
    edges: tuple[EdgeCount, ...] = ()
    steps: tuple[int, ...] = ()
    """Steps whose bytes are compared."""
    syncs: tuple[SyncCount, ...] = ()
    """Weight syncs of those steps that had any."""
    attention: tuple[AttentionCount, ...] = ()
    """Models whose ranks divide rows."""
    memory: tuple[PhaseBytes, ...] = ()
    """Phases that were both planned and measured."""
    notes: tuple[str, ...] = ()
    """What could not be predicted, each with the reason."""

    @property
    def bytes_agree(self) -> bool:
        """Whether every edge has the planned bytes."""
        return all(edge.planned == edge.counted for edge in self.edges)

    def to_plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return {
            "hardware": self.hardware,
            "stages": [stage._asdict() for stage in self.stages],
            "steps": self.steps,
            "bytes_agree": self.bytes_agree,
            "edges": self.edges,
            "weight_syncs": [sync._asdict() for sync in self.syncs],
            "attention": [count._asdict() for count in self.attention],
            "memory": [phase._asdict() for phase in self.memory],
            "notes": self.notes,
        }


def compare_run(cfg: Any) -> None:
    """Write prediction.json and prediction.txt of a run that has just ended, and log their path.

    Also logs a warning if the row bytes of an edge differ from the plan. Never fails a run: its own
    errors are only logged. Any: the script's settings.
    """
    try:
        run_dir = path_of(cfg.run)
        comparison = compare(cfg, run_dir)
        plain = json.dumps(comparison.to_plain(), indent=1)
        (run_dir / JSON_FILE).write_text(plain, encoding="utf-8")
        (run_dir / TEXT_FILE).write_text(comparison_text(comparison), encoding="utf-8")
        logger.info("Predicted and measured seconds and bytes: %s", run_dir / TEXT_FILE)
        if not comparison.bytes_agree:
            logger.warning("bytes between ranks differ from the plan: see %s", run_dir / TEXT_FILE)
    except Exception as err:  # the run is over and fine: a prediction must not change its status
        logger.info("no prediction written: %s: %s", type(err).__name__, err)


def compare(cfg: Any, run_dir: Path, *, hardware: Hardware | None = None) -> Comparison:
    """Predict a run from its record, and compare that with what the run measured.

    The predicted step is the last one without an evaluation, or the last one if all have one.
    Without a readable record, only measured seconds are returned, with a note. Without known
    hardware, seconds are not predicted; if the plan of any weights is unknown, no weight syncs are
    compared (both noted). Raises DataError if metrics.jsonl has no step. Any: the script's
    settings.
    hardware: instead of run.hardware, or of this node, with the run's number of ranks per node.
    """
    try:
        replay = Replay.of_run(run_dir)
        traced = recorded_trace(replay)
    except SpmdflowError as err:
        measured = _median_seconds(run_dir)
        return Comparison("", _stages(None, measured), notes=(f"nothing is predicted: {err}",))
    first_step = min((step for step in replay.steps if step > 0), default=1)
    measured = _median_seconds(run_dir, since=first_step)
    weights = weight_plans(traced)
    notes = []
    try:  # with as many ranks a node as the run had
        nodes = list(replay.nodes.values())
        hardware = hardware or hardware_of(cfg.run.hardware, max(map(nodes.count, nodes)))
    except SpmdflowError as err:
        notes.append(f"seconds are not predicted: {err}")
    predicted = None
    if hardware is not None and traced.steps:
        steps = [traced.in_step(step) for step in traced.steps]
        plain = []
        for orders in steps:
            if all(order.phase == "train" for order in orders):
                plain.append(orders)
        predicted = predict(traced, (plain or steps)[-1], hardware, weights=weights)
        notes += predicted.without.values()
    unknown = []
    for plan in weights:
        if plan.inter_bytes < 0:
            unknown.append(plan)
            notes.append(f"bytes of weights to {plan.target} are not compared: {plan.note}")
    return Comparison(
        hardware=hardware.name if hardware else "",
        stages=_stages(predicted, measured),
        edges=tuple(_edges(replay, traced)),
        steps=replay.steps,
        syncs=() if unknown else tuple(_syncs(replay, traced, weights)),
        attention=tuple(_attention_counts(predicted, run_dir)),
        memory=tuple(_memory(predicted, run_dir)),
        notes=tuple(notes),
    )


def _median_seconds(run_dir: Path, *, since: int = 1) -> dict[str, float]:
    """Return the median seconds of each method and of the whole step ("step"), from metrics.jsonl.

    They are the metrics time/<name>_seconds, without the first step if there are more, and without
    missing values. Raises DataError if there is no step after 0.
    since: the first step that counts. Earlier starts of a run may have had another layout.
    """
    steps = []
    for line in read_lines(run_dir / "metrics.jsonl"):
        if line["step"] >= since:
            steps.append(line)
    if not steps:
        raise DataError(f"{run_dir}: got no step in metrics.jsonl, expected a run with steps")
    seconds: dict[str, list[float]] = {}
    for step in steps[1:] or steps:
        for name, value in step.items():
            if name.startswith("time/") and value is not None:
                stage = name.removeprefix("time/").removesuffix("_seconds")
                seconds.setdefault(stage, []).append(float(value))
    return {stage: median(values) for stage, values in seconds.items()}


def _stages(predicted: Prediction | None, measured: Mapping[str, float]) -> tuple[StageTime, ...]:
    """Return the methods that were both predicted and measured, then the whole step.

    Without a prediction, only the measured step.
    """
    if predicted is None:
        return (StageTime("step", None, measured.get("step")),)
    stages = []
    for name, seconds in predicted.stage_seconds().items():
        if name in measured:
            stages.append(StageTime(name, seconds, measured[name]))
    stages.append(StageTime("step", predicted.seconds, measured.get("step")))
    return tuple(stages)


def _edges(replay: Replay, traced: Trace) -> Iterator[EdgeCount]:
    """Yield row bytes, planned and counted, of every edge that has either, over all recorded steps.

    Edges ascend by (source, destination). A missing number is 0.
    """
    counted = sum((Counter(replay.edges(step)) for step in replay.steps), Counter())
    planned = traced.edges
    for edge in sorted({*planned, *counted}):
        yield EdgeCount(*edge, planned.get(edge, 0), counted[edge])


def _syncs(replay: Replay, traced: Trace, weights: Sequence[WeightPlan]) -> Iterator[SyncCount]:
    """Yield the weight syncs of every recorded step that has any, by plan or by the run's count.

    planned = sum over models of (number of syncs * plan.reported). counted is the step's metric
    rollout/synced_bytes, or 0.
    """
    reported = {}
    for plan in weights:
        reported[plan.target] = plan.reported
    synced = (replay.start or {}).get("synced")
    expected = syncs_by_step(traced, synced=synced or ())
    for step in replay.steps:
        times = expected.get(step, Counter())
        planned = sum(number * reported[name] for name, number in times.items())
        counted = int(replay.metrics(step).get("rollout/synced_bytes", 0))
        if times or counted:
            yield SyncCount(step, times.total(), planned, counted)


def _attention_counts(predicted: Prediction | None, run_dir: Path) -> Iterator[AttentionCount]:
    """Yield the bytes of each model whose plan has some and whose run has counted them."""
    if predicted is None:
        return
    for name, planned in predicted.attention_bytes.items():
        counted = []
        for line in read_lines(run_dir / "metrics.jsonl"):
            value = line.get(f"{name}/context_bytes")
            if value:
                counted.append(float(value))
        if counted:
            yield AttentionCount(name, planned, median(counted))


def _memory(predicted: Prediction | None, run_dir: Path) -> Iterator[PhaseBytes]:
    """Yield the phases of a prediction whose peak the run's last launch measured.

    A measured peak is that of the rank that had most, over all steps (device_bytes in calls.jsonl).
    """
    if predicted is None:
        return
    measured: dict[str, int] = {}
    for line in read_lines(run_dir / "calls.jsonl"):
        if "device_bytes" in line:
            name = line["label"]
            if line["operation"] == "spawn":
                name = name.removesuffix(".spawn") + ".build"
            measured[name] = max(measured.get(name, 0), line["device_bytes"])
    for phase in predicted.memory:
        if phase.phase in measured:
            parts = {name: size for name, size in phase.parts.items() if size}
            yield PhaseBytes(phase.phase, phase.total, parts, measured[phase.phase])


def comparison_text(comparison: Comparison) -> str:
    """Return the text of RUN_DIR/prediction.txt: seconds by stage, bytes, memory, notes.

    At most twelve edges are listed: those whose bytes differ or, if none does, those with the most
    bytes. A last line has the sum over all edges.
    """
    hardware = comparison.hardware or "no hardware"
    lines = [f"seconds of a step, predicted for {hardware} and measured", ""]
    rows: list[Sequence[object]] = [("stage", "predicted", "measured", "predicted / measured")]
    for stage, predicted, measured in comparison.stages:
        ratio = f"{predicted / measured:.2f}" if predicted and measured else ""
        rows.append((stage, seconds_of(predicted), seconds_of(measured), ratio))
    lines += table(rows, right=(1, 2, 3))
    if comparison.steps:
        steps = ", ".join(map(str, comparison.steps))
        lines += ["", f"row bytes by edge, steps {steps}: planned and counted", ""]
        odd = []
        for edge in comparison.edges:
            if edge.planned != edge.counted:
                odd.append(edge)
        ranked = sorted(comparison.edges, key=lambda edge: -edge.counted)
        rows = [("edge", "planned", "counted", "")]
        for source, to, *sizes in (odd or ranked)[:_SHOWN_EDGES]:
            rows.append((f"{source} -> {to}", *sizes, "differs" if odd else ""))
        planned = sum(edge.planned for edge in comparison.edges)
        counted = sum(edge.counted for edge in comparison.edges)
        verdict = f"{len(odd)} edges differ" if odd else "equal on every edge"
        rows.append((f"all {len(comparison.edges)}", planned, counted, verdict))
        lines += table(rows, right=(1, 2))
    if comparison.syncs:
        lines += ["", "weights from trainer to generator: bytes planned and counted", ""]
        rows = [("step", "syncs", "planned", "counted", "")]
        rows += [(*s, "" if s.planned == s.counted else "differs") for s in comparison.syncs]
        lines += table(rows, right=(1, 2, 3))
    if comparison.attention:
        lines += ["", "attention where ranks divide rows: bytes of an optimizer step", ""]
        lines += _attention_lines(comparison.attention)
    if comparison.memory:
        lines += ["", "memory of the fullest rank in GB, planned and measured", ""]
        lines += _memory_lines(comparison.memory)
    lines += [f"note: {note}" for note in comparison.notes]
    return "\n".join(lines) + "\n"


def _attention_lines(counts: Sequence[AttentionCount]) -> Iterator[str]:
    """Return a table with a row for each model."""
    rows: list[Sequence[object]] = [("model", "planned", "counted", "planned / counted")]
    for count in counts:
        ratio = f"{count.planned / count.counted:.2f}"
        rows.append((count.model, round(count.planned), round(count.counted), ratio))
    yield from table(rows, right=(1, 2, 3))


def _memory_lines(phases: Sequence[PhaseBytes]) -> Iterator[str]:
    """Yield a table of all phases, then what the plan of each consists of, the largest first."""
    rows: list[Sequence[object]] = [("phase", "planned", "measured", "planned / measured")]
    for phase in phases:
        planned = f"{phase.planned / 1e9:.3f}"
        measured = f"{phase.measured / 1e9:.3f}"
        rows.append((phase.phase, planned, measured, f"{phase.planned / phase.measured:.2f}"))
    yield from table(rows, right=(1, 2, 3))
    yield ""
    for phase in phases:
        parts = []
        for name, size in sorted(phase.parts.items(), key=lambda part: -part[1]):
            parts.append(f"{name} {size / 1e9:.3f}")
        yield from wrap_paragraph(f"  {phase.phase} is planned with", ", ".join(parts))
