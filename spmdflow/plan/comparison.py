"""Prediction beside measurement: RUN_DIR/prediction.json and prediction.txt, after a run.

All of it is made from what the run recorded of its first steps (`controller.transcript`). Seconds:
predicted for its calls, with their rows and lengths, and measured, the median over the steps, the
first left out where there are more. Bytes: of the transfers that the controller ordered, edge by
edge, and of the weights sync by sync, beside what the ranks counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from spmdflow.checkpoint.run_dir import path_of
from spmdflow.config.placement import Pool
from spmdflow.errors import DataError, SpmdflowError
from spmdflow.mapping.machine import Hardware
from spmdflow.parallel.layout import Layout
from spmdflow.plan.answers import Answers, Lengths
from spmdflow.plan.example import Examples
from spmdflow.plan.prediction import Prediction, predict
from spmdflow.plan.record import (
    COMPUTE,
    TRANSFER,
    Tokens,
    Trace,
    TracedModel,
    TracedOrder,
    bytes_by_edge,
    row_edges,
)
from spmdflow.plan.replay import Replay
from spmdflow.plan.text import seconds_of, table
from spmdflow.plan.weight import syncs_by_step, weight_plans
from spmdflow.plan.workload import hardware_of, simulated
from spmdflow.runtime.message import find
from spmdflow.tracking.tracker import read_lines

logger = logging.getLogger(__name__)

JSON_FILE, TEXT_FILE = "prediction.json", "prediction.txt"
_SHOWN_EDGES = 12
Edge = tuple[int, int]


@dataclass(frozen=True)
class StageTime:
    """Seconds of one method in a step; None: not known."""

    stage: str
    predicted: float | None
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


def compare_run(cfg: Any) -> None:
    """Write the comparison of a run that has just ended, and log where it is.

    It never fails a run: what stands in its way is logged. Any: the script's settings.
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
    """Predict a run from its record, and lay it beside what it measured.

    DataError without a step in metrics.jsonl. Any: the script's settings.
    """
    notes: list[str] = []
    measured = _measured(run_dir)
    try:
        replay = Replay.of_run(run_dir)
        traced = recorded_trace(replay)
    except SpmdflowError as err:
        notes.append(f"nothing is predicted: {err}")
        return Comparison("", tuple(_stages(None, measured)), notes=tuple(notes))
    hardware = hardware or _hardware(cfg, replay, notes)
    predicted = _of_trace(traced, hardware) if hardware is not None and traced.steps else None
    notes += predicted.without.values() if predicted else ()
    return Comparison(
        hardware=hardware.name if hardware else "",
        stages=tuple(_stages(predicted, measured)),
        edges=tuple(_edges(replay, traced)),
        steps=replay.steps,
        syncs=tuple(_syncs(replay, traced, notes)),
        notes=tuple(notes),
    )


def _hardware(cfg: Any, replay: Replay, notes: list[str]) -> Hardware | None:
    """run.hardware or this machine's kind, with as many ranks a node as the run had."""
    nodes = list(replay.nodes.values())
    try:
        return hardware_of(cfg.run.hardware, max(nodes.count(node) for node in set(nodes)))
    except SpmdflowError as err:
        notes.append(f"seconds are not predicted: {err}")
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


def _stages(predicted: Prediction | None, measured: Mapping[str, float]) -> Iterator[StageTime]:
    known = predicted.stage_seconds() if predicted else {}
    for stage, seconds in known.items():
        if stage in measured:
            yield StageTime(stage, seconds, measured[stage])
    yield StageTime("step", predicted.seconds if predicted else None, measured.get("step"))


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
    rows = [("stage", "predicted", "measured", "predicted / measured")]
    for stage in found.stages:
        ratio = ""
        if stage.predicted and stage.measured:
            ratio = f"{stage.predicted / stage.measured:.2f}"
        cells = (stage.predicted, stage.measured)
        one, two = ("" if cell is None else seconds_of(cell) for cell in cells)
        rows.append((stage.stage, one, two, ratio))
    lines += table(rows, right=(1, 2, 3))
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


_Arrival = tuple[int, Sequence[str], np.ndarray]
"""Frame, columns, row ids."""


def recorded_trace(replay: Replay) -> Trace:
    """What a dry run with these lengths would have recorded, of the steps that were kept.

    A pool is the ranks of its models. Lines of the script and rows of updates are not known.
    """
    orders = [_order(place, entry) for place, entry in enumerate(_in_dry_order(replay.orders))]
    answers = Answers(Examples(is_replayed=True), Lengths(1, 1), _not_scanned, replay)
    tokens: dict[int, Tokens] = {}
    for order in orders:
        if order.lane == COMPUTE:
            answers.to(order.label, order.number, order.commands)
            found = answers.tokens(order.number, order.commands)
            tokens |= {} if found is None else {order.place: found}
    models = [_model(order) for order in orders if order.operation == "spawn"]
    opened = [order.label.partition(".")[0] for order in orders if _opens_weights(order)]
    by_step = {step: [order for order in orders if order.step == step] for step in replay.steps}
    return Trace(
        world=replay.ranks,
        nodes=tuple(replay.nodes[rank] for rank in replay.ranks),
        pools={model.pool: Pool((), tuple(model.layout.ranks)) for model in models},
        models={model.name: model for model in models},
        links=tuple(zip(opened[::2], opened[1::2], strict=True)),
        orders=tuple(orders),
        tokens=tokens,
        edges=bytes_by_edge(row_edges(orders)),
        steps=tuple(step for step in replay.steps if step),
        edges_by_step={n: bytes_by_edge(row_edges(orders)) for n, orders in by_step.items()},
    )


def _in_dry_order(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every transfer just before the first call that reads its rows, as a dry run has it."""
    waiting = [(entry, *_an_edge(entry)) for entry in entries if entry["lane"] == TRANSFER]
    found: list[Mapping[str, Any]] = []
    for entry in entries:
        if entry["lane"] == COMPUTE:
            commands = _commands(entry)
            read = [_reads(commands.get(rank, {}), edge) for _, rank, edge in waiting]
            found += [each[0] for each, now in zip(waiting, read, strict=True) if now]
            waiting = [each for each, now in zip(waiting, read, strict=True) if not now]
            found.append(entry)
    return found + [entry for entry, _, _ in waiting]


def _an_edge(transfer: Mapping[str, Any]) -> tuple[int, _Arrival]:
    """A rank, and the frame, columns and rows that it receives: one edge tells what reads them."""
    received = ((rank, plain) for rank, plain in _commands(transfer).items() if plain["receives"])
    rank, plain = next(received)
    _, columns, ids, *_ = plain["receives"][0]
    return rank, (plain["frame"], columns, ids)


def _reads(plain: Mapping[str, Any], edge: _Arrival) -> bool:
    """Whether a command reads the rows of an edge."""
    frame, columns, ids = edge
    return any(
        part.get("frame") == frame
        and set(columns) <= set(part["columns"])
        and bool(np.isin(ids, part["ids"]).all())
        for part in plain.get("inputs", ())
    )


def _commands(entry: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Command by rank."""
    return {rank: plain for ranks, plain in entry["commands"] for rank in ranks}


def _order(place: int, entry: Mapping[str, Any]) -> TracedOrder:
    facts = {name: entry[name] for name in ("number", "lane", "label", "step", "phase")}
    return TracedOrder(place, **facts, line=None, commands=_commands(entry))


def _model(order: TracedOrder) -> TracedModel:
    plain = next(iter(order.commands.values()))
    layout = Layout(**plain["layout"] | {"ranks": tuple(plain["layout"]["ranks"])})
    return TracedModel(
        plain["name"], find(plain["class"]), plain["config"], layout, pool=str(layout.ranks)
    )


def _opens_weights(order: TracedOrder) -> bool:
    """Of a policy, then of its generator: how `flow.connect` begins."""
    return order.operation == "call" and order.label.endswith(".open_weights")


def _not_scanned(data: Any, path: str) -> Any:
    """A run has scanned its files; Any: what `Answers` is given."""
    raise AssertionError(f"{path}: scanned, but the run recorded no report of it")
