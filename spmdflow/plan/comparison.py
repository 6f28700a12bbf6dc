"""Prediction beside measurement: RUN_DIR/prediction.json and prediction.txt, after a run.

Seconds: predicted from the settings, as before the run, and from the lengths that the run had;
measured is the median over its steps, the first left out where there are more. Bytes: the plan of
the first steps with the run's own lengths, edge by edge, and of the weights sync by sync, beside
what the ranks counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from spmdflow.checkpoint.run_dir import path_of
from spmdflow.errors import DataError, SpmdflowError
from spmdflow.mapping.machine import Hardware
from spmdflow.plan.edge import row_edges
from spmdflow.plan.machine import hardware_of
from spmdflow.plan.prediction import Prediction, predict
from spmdflow.plan.record import Trace
from spmdflow.plan.replay import Replay
from spmdflow.plan.table import bytes_of, seconds_of, table
from spmdflow.plan.trace import TraceSettings, trace, trace_replayed
from spmdflow.plan.weight import syncs_by_step, weight_plans
from spmdflow.plan.workload import simulated
from spmdflow.tracking.line import read_lines

logger = logging.getLogger(__name__)

JSON_FILE, TEXT_FILE = "prediction.json", "prediction.txt"
_SHOWN_EDGES = 12
Edge = tuple[int, int]


@dataclass(frozen=True)
class StageTime:
    """Seconds of one method in a step; None: not known."""

    stage: str
    from_settings: float | None
    from_lengths: float | None
    measured: float | None


@dataclass(frozen=True)
class EdgeCount:
    """Row bytes of one edge over the compared steps."""

    source: int
    destination: int
    planned: int
    counted: int


@dataclass(frozen=True)
class SyncCount:
    """Weights that passed to generators in the training calls of a step."""

    step: int
    syncs: int
    planned: int
    """Bytes that rollout/synced_bytes was to say."""
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
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What could not be predicted, and why."""

    @property
    def bytes_agree(self) -> bool:
        """Whether every edge has the planned bytes."""
        return all(edge.planned == edge.counted for edge in self.edges)

    def to_plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return {
            "hardware": self.hardware,
            "stages": [vars(stage) for stage in self.stages],
            "steps": list(self.steps),
            "bytes_agree": self.bytes_agree,
            "edges": [[e.source, e.destination, e.planned, e.counted] for e in self.edges],
            "weight_syncs": [vars(sync) for sync in self.syncs],
            "notes": list(self.notes),
        }

    def describe(self) -> str:
        """One line for the log."""
        step = next((stage for stage in self.stages if stage.stage == "step"), None)
        parts = []
        if step is not None and step.measured is not None:
            known = step.from_lengths or step.from_settings
            said = "not predicted" if known is None else f"predicted {seconds_of(known)}"
            parts.append(f"a step: {said}, measured {seconds_of(step.measured)}")
        if self.steps:
            total = sum(edge.counted for edge in self.edges)
            verdict = "as planned" if self.bytes_agree else "NOT as planned"
            parts.append(f"{bytes_of(total)} on {len(self.edges)} edges {verdict}")
        missing = self.notes[:1] if not self.hardware or not self.steps else ()
        return "; ".join([*parts, *missing])


def compare_run(
    script: ModuleType, cfg: Any, ranks: tuple[int, ...], examples: Mapping[str, Any] | None = None
) -> None:
    """Write the comparison of a run on `ranks` that has just ended, and log one line of it.

    It never fails a run: what stands in its way is logged. The script's main is called again, dry;
    what it prints then is dropped. Any: the script's settings.
    """
    try:
        run_dir = path_of(cfg.run)
        with redirect_stdout(StringIO()):
            found = compare(script, cfg, run_dir, world=ranks, examples=examples)
        (run_dir / JSON_FILE).write_text(json.dumps(found.to_plain(), indent=1), encoding="utf-8")
        (run_dir / TEXT_FILE).write_text(comparison_text(found), encoding="utf-8")
        logger.info("prediction (%s): %s", TEXT_FILE, found.describe())
    except Exception as err:  # the run is over and fine: a prediction must not change its status
        logger.warning("no prediction: %s: %s", type(err).__name__, err)


def compare(
    script: ModuleType,
    cfg: Any,
    run_dir: Path,
    *,
    world: tuple[int, ...],
    hardware: Hardware | None = None,
    examples: Mapping[str, Any] | None = None,
) -> Comparison:
    """Predict a run that was, and lay it beside what it measured.

    examples: of what only a run knows, for the prediction from the settings; over the script's.
    """
    notes: list[str] = []
    replay, traced = _traced(script, cfg, run_dir, notes)
    hardware = hardware or _hardware(cfg, len(world), replay, notes)
    measured = _measured(run_dir)
    before = after = None
    if hardware is not None:
        nodes = tuple(replay.nodes.get(rank, 0) for rank in range(max(world) + 1))
        settings = TraceSettings(world=world, nodes=nodes, read_data=False, examples=examples or {})
        before = _of_settings(script, cfg, settings, hardware, notes)
        after = None if traced is None else _of_trace(traced, hardware)
    notes += after.without.values() if after else ()
    syncs = tuple(_syncs(replay, traced, notes)) if traced else ()
    return Comparison(
        hardware=hardware.name if hardware else "",
        stages=tuple(_stages(before, after, measured)),
        edges=tuple(_edges(replay, traced)) if traced else (),
        steps=tuple(step for step in replay.steps) if traced else (),
        syncs=syncs,
        notes=tuple(notes),
    )


def _hardware(cfg: Any, world_size: int, replay: Replay, notes: list[str]) -> Hardware | None:
    """run.hardware or this machine's kind, with as many ranks a node as the run had."""
    nodes = list(replay.nodes.values())
    node_size = max((nodes.count(node) for node in set(nodes)), default=world_size)
    try:
        return hardware_of(cfg.run.hardware, node_size)
    except SpmdflowError as err:
        notes.append(f"seconds are not predicted: {err}")
        return None


def _traced(
    script: ModuleType, cfg: Any, run_dir: Path, notes: list[str]
) -> tuple[Replay, Trace | None]:
    try:
        replay = Replay.of_run(run_dir)
        return replay, trace_replayed(script, cfg, replay)
    except SpmdflowError as err:
        notes.append(f"bytes are not compared: {err}")
        return Replay(), None


def _of_settings(
    script: ModuleType, cfg: Any, settings: TraceSettings, hardware: Hardware, notes: list[str]
) -> Prediction | None:
    """As a plan: where a generator has ranks of its own, the first step fills a pipeline."""
    try:
        traced = trace(script, cfg, settings)
        if traced.links:
            traced = trace(script, cfg, replace(settings, num_steps=2))
        return _of_trace(traced, hardware)
    except SpmdflowError as err:
        notes.append(f"not predicted from the settings: {err}")
        return None


def _of_trace(traced: Trace, hardware: Hardware) -> Prediction:
    """Of the last step without an evaluation, if there is one."""
    steps = [traced.in_step(step) for step in traced.steps]
    plain = [orders for orders in steps if all(order.phase == "train" for order in orders)]
    orders = (plain or steps)[-1]
    edges, step = list(row_edges(orders)), simulated(traced, orders)
    return predict(traced, orders, edges, step, hardware, ways=weight_plans(traced, {}))


def _measured(run_dir: Path) -> dict[str, float]:
    """Median seconds by method and of a step."""
    steps = [line for line in read_lines(run_dir / "metrics.jsonl") if line["step"] > 0]
    steps = steps[1:] or steps
    if not steps:
        raise DataError(f"{run_dir}: got no step in metrics.jsonl, expected a run with steps")
    names = {name for step in steps for name in step if name.startswith("time/")}
    return {
        name.removeprefix("time/").removesuffix("_seconds"): median(
            float(step[name]) for step in steps if step.get(name) is not None
        )
        for name in sorted(names)
        if any(step.get(name) is not None for step in steps)
    }


def _stages(
    before: Prediction | None, after: Prediction | None, measured: Mapping[str, float]
) -> Iterator[StageTime]:
    first = before.stage_seconds() if before else {}
    second = after.stage_seconds() if after else {}
    for stage in dict.fromkeys([*first, *second]):
        if stage in measured:
            yield StageTime(stage, first.get(stage), second.get(stage), measured[stage])
    yield StageTime(
        "step",
        before.seconds if before else None,
        after.seconds if after else None,
        measured.get("step"),
    )


def _edges(replay: Replay, traced: Trace) -> Iterator[EdgeCount]:
    planned: dict[Edge, int] = {}
    counted: dict[Edge, int] = {}
    for step in replay.steps:
        for total, edges in ((planned, traced.edges_by_step[step]), (counted, replay.edges(step))):
            for edge, size in edges.items():
                total[edge] = total.get(edge, 0) + size
    for source, destination in sorted({*planned, *counted}):
        edge = source, destination
        yield EdgeCount(*edge, planned.get(edge, 0), counted.get(edge, 0))


def _syncs(replay: Replay, traced: Trace, notes: list[str]) -> Iterator[SyncCount]:
    ways = {way.target: way for way in weight_plans(traced, {})}
    unknown = [way for way in ways.values() if way.inter_bytes < 0]
    if unknown:
        notes += [
            f"bytes of weights to {way.target} are not compared: {way.note}" for way in unknown
        ]
        return
    expected = syncs_by_step(traced)
    for step in replay.steps:
        times = expected.get(step, {})
        planned = sum(number * ways[name].reported for name, number in times.items())
        counted = int(replay.metrics(step).get("rollout/synced_bytes", 0))
        if times or counted:
            yield SyncCount(step, sum(times.values()), planned, counted)


def comparison_text(found: Comparison) -> str:
    """The table of RUN_DIR/prediction.txt."""
    lines = [f"seconds of a step, predicted for {found.hardware or 'no hardware'} and measured", ""]
    rows = [("stage", "from settings", "from lengths", "measured", "predicted / measured")]
    for stage in found.stages:
        known = stage.from_lengths or stage.from_settings
        ratio = f"{known / stage.measured:.2f}" if known and stage.measured else ""
        cells = (stage.from_settings, stage.from_lengths, stage.measured)
        one, two, three = ("" if cell is None else seconds_of(cell) for cell in cells)
        rows.append((stage.stage, one, two, three, ratio))
    lines += table(rows, right=(1, 2, 3, 4))
    if found.steps:
        steps = ", ".join(map(str, found.steps))
        lines += ["", f"row bytes by edge, steps {steps}: planned and counted", ""]
        counts = [("edge", "planned", "counted", "")]
        odd = [edge for edge in found.edges if edge.planned != edge.counted]
        ranked = sorted(found.edges, key=lambda edge: -edge.counted)
        for edge in (odd or ranked)[:_SHOWN_EDGES]:
            verdict = "" if edge.planned == edge.counted else "differs"
            name = f"{edge.source} -> {edge.destination}"
            counts.append((name, str(edge.planned), str(edge.counted), verdict))
        planned = sum(edge.planned for edge in found.edges)
        counted = sum(edge.counted for edge in found.edges)
        verdict = "equal on every edge" if not odd else f"{len(odd)} edges differ"
        counts.append((f"all {len(found.edges)}", str(planned), str(counted), verdict))
        lines += table(counts, right=(1, 2))
    if found.syncs:
        lines += ["", "weights from trainer to generator: bytes planned and counted", ""]
        syncs = [("step", "syncs", "planned", "counted", "")]
        for sync in found.syncs:
            verdict = "" if sync.planned == sync.counted else "differs"
            sizes = str(sync.planned), str(sync.counted)
            syncs.append((str(sync.step), str(sync.syncs), *sizes, verdict))
        lines += table(syncs, right=(1, 2, 3))
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines) + "\n"
