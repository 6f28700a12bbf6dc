"""Prediction beside measurement: RUN_DIR/prediction.json and prediction.txt, after a run.

All of it is made from what the run recorded of its first steps (`controller.transcript`). Seconds:
predicted for its calls, with their rows and lengths, and measured, the median over the steps, the
first left out where there are more. Bytes: of the transfers that the controller ordered, edge by
edge, and of the weights sync by sync, beside what the ranks counted.
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
from spmdflow.plan.text import seconds_of, table
from spmdflow.plan.weight import WeightPlan, syncs_by_step, weight_plans
from spmdflow.plan.workload import hardware_of
from spmdflow.tracking.tracker import read_lines

logger = logging.getLogger(__name__)

JSON_FILE = "prediction.json"
TEXT_FILE = "prediction.txt"
_SHOWN_EDGES = 12


class StageTime(NamedTuple):
    """Seconds of one method in a step; None: not known."""

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
    """Weight syncs to generators in the training calls of a step; planned and counted: bytes,
    expected and reported as rollout/synced_bytes."""

    step: int
    syncs: int
    planned: int
    counted: int


@dataclass(frozen=True)
class Comparison:
    """What was predicted and what was measured."""

    hardware: str
    stages: tuple[StageTime, ...] = ()
    edges: tuple[EdgeCount, ...] = ()
    steps: tuple[int, ...] = ()
    """Steps whose bytes are compared."""
    syncs: tuple[SyncCount, ...] = ()
    """Of those steps that moved weights."""
    notes: tuple[str, ...] = ()
    """What could not be predicted, and why."""

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
            "notes": self.notes,
        }


def compare_run(cfg: Any) -> None:
    """Write the comparison of a run that has just ended, and log where it is.

    It never fails a run: its own errors are logged. Any: the script's settings.
    """
    try:
        run_dir = path_of(cfg.run)
        found = compare(cfg, run_dir)
        (run_dir / JSON_FILE).write_text(json.dumps(found.to_plain(), indent=1), encoding="utf-8")
        (run_dir / TEXT_FILE).write_text(comparison_text(found), encoding="utf-8")
        logger.info("predicted and measured seconds and bytes: %s", run_dir / TEXT_FILE)
        if not found.bytes_agree:
            logger.warning("bytes between ranks differ from the plan: see %s", run_dir / TEXT_FILE)
    except Exception as err:  # the run is over and fine: a prediction must not change its status
        logger.info("no prediction is written: %s: %s", type(err).__name__, err)


def compare(cfg: Any, run_dir: Path, *, hardware: Hardware | None = None) -> Comparison:
    """Predict a run from its record, and compare with what it measured.

    DataError without a step in metrics.jsonl. Any: the script's settings.
    """
    measured = _median_seconds(run_dir)
    try:
        replay = Replay.of_run(run_dir)
        traced = recorded_trace(replay)
    except SpmdflowError as err:
        return Comparison("", _stages(None, measured), notes=(f"nothing is predicted: {err}",))
    ways = weight_plans(traced)
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
        predicted = predict(traced, (plain or steps)[-1], hardware, ways=ways)
        notes += predicted.without.values()
    unknown = []
    for way in ways:
        if way.inter_bytes < 0:
            unknown.append(way)
    notes += [f"bytes of weights to {way.target} are not compared: {way.note}" for way in unknown]
    return Comparison(
        hardware=hardware.name if hardware else "",
        stages=_stages(predicted, measured),
        edges=tuple(_edges(replay, traced)),
        steps=replay.steps,
        syncs=() if unknown else tuple(_syncs(replay, traced, ways)),
        notes=tuple(notes),
    )


def _median_seconds(run_dir: Path) -> dict[str, float]:
    """Median seconds by method and of a step."""
    steps = []
    for line in read_lines(run_dir / "metrics.jsonl"):
        if line["step"] > 0:
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
    known = predicted.stage_seconds() if predicted else {}
    found = []
    for name in known:
        if name in measured:
            found.append(StageTime(name, known[name], measured[name]))
    step = StageTime("step", predicted.seconds if predicted else None, measured.get("step"))
    return *found, step


def _edges(replay: Replay, traced: Trace) -> Iterator[EdgeCount]:
    counted = sum((Counter(replay.edges(step)) for step in replay.steps), Counter())
    planned = traced.edges
    for edge in sorted({*planned, *counted}):
        yield EdgeCount(*edge, planned.get(edge, 0), counted[edge])


def _syncs(replay: Replay, traced: Trace, ways: Sequence[WeightPlan]) -> Iterator[SyncCount]:
    reported = {}
    for way in ways:
        reported[way.target] = way.reported
    synced = (replay.start or {}).get("synced")
    expected = syncs_by_step(traced, synced=synced or ())
    for step in replay.steps:
        times = expected.get(step, Counter())
        planned = sum(number * reported[name] for name, number in times.items())
        counted = int(replay.metrics(step).get("rollout/synced_bytes", 0))
        if times or counted:
            yield SyncCount(step, times.total(), planned, counted)


def comparison_text(found: Comparison) -> str:
    """The table of RUN_DIR/prediction.txt."""
    lines = [f"seconds of a step, predicted for {found.hardware or 'no hardware'} and measured", ""]
    rows: list[Sequence[object]] = [("stage", "predicted", "measured", "predicted / measured")]
    for stage, predicted, measured in found.stages:
        ratio = f"{predicted / measured:.2f}" if predicted and measured else ""
        rows.append((stage, seconds_of(predicted), seconds_of(measured), ratio))
    lines += table(rows, right=(1, 2, 3))
    if found.steps:
        steps = ", ".join(map(str, found.steps))
        lines += ["", f"row bytes by edge, steps {steps}: planned and counted", ""]
        odd = []
        for edge in found.edges:
            if edge.planned != edge.counted:
                odd.append(edge)
        ranked = sorted(found.edges, key=lambda edge: -edge.counted)
        rows = [("edge", "planned", "counted", "")]
        for source, to, *sizes in (odd or ranked)[:_SHOWN_EDGES]:
            rows.append((f"{source} -> {to}", *sizes, "differs" if odd else ""))
        planned = sum(edge.planned for edge in found.edges)
        counted = sum(edge.counted for edge in found.edges)
        verdict = f"{len(odd)} edges differ" if odd else "equal on every edge"
        rows.append((f"all {len(found.edges)}", planned, counted, verdict))
        lines += table(rows, right=(1, 2))
    if found.syncs:
        lines += ["", "weights from trainer to generator: bytes planned and counted", ""]
        rows = [("step", "syncs", "planned", "counted", "")]
        rows += [(*s, "" if s.planned == s.counted else "differs") for s in found.syncs]
        lines += table(rows, right=(1, 2, 3))
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines) + "\n"
