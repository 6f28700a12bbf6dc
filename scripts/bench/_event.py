"""One step of a placement as events: which call runs on which pool from when to when.

Finer than the sum of stages: a pool runs its calls in order and starts each as soon as its rows are
there. With `chunks`, generation hands its rows over in so many parts, as replicas finish waves or
short responses, and pools that score start on a part while the rest is still generated; updates
wait for all rows. Where the rows of one part come from is not modelled: parts are equal.

`event_scores` is a result of its own, beside d_cost: the ten best placements and the paper's are
ranked by the time of their events, with the rows handed over in 1, 2, 4 or 8 parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench._cells import CELLS, score_cell
from spmdflow.mapping.dataflow import Dataflow, ModelCall
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.placed import Placed, PlacedPool

CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Event:
    """A call, or one part of it, on its pool. Seconds since the step began."""

    pool: str
    model: str
    call: str
    """The method."""
    number: int
    """The call's number in the dataflow."""
    chunk: int
    start: float
    end: float


def simulate_events(dataflow: Dataflow, placed: Placed, *, chunks: int = 1) -> list[Event]:
    """Events of one step, in the order of calls and parts."""
    free = {pool.roles: 0.0 for pool in placed.pools}
    done: dict[tuple[str, int], float] = {}
    events = []
    for number, call in enumerate(dataflow.calls):
        pool = placed.pool_of(call.model)
        parts = 1 if call.kind == "train" else chunks
        for chunk in range(parts):
            start = max(free[pool.roles], _ready(dataflow, call, chunk, chunks, done))
            end = start + _seconds(pool, number, chunk, parts)
            free[pool.roles] = end
            key = call.kind, chunk
            done[key] = max(done.get(key, 0.0), end)
            name = call.name or call.kind
            events.append(Event("+".join(pool.roles), call.model, name, number, chunk, start, end))
    return events


def step_seconds(events: list[Event]) -> float:
    """When the last event ends."""
    return max(event.end for event in events)


def event_scores(hardware: Hardware, *, log_prob: bool = True) -> dict[int, tuple[int, int, str]]:
    """Parts -> (cells within 1 %, within 5 %, ratios of the others)."""
    scores = [score_cell(cell, hardware, log_prob=log_prob, keep=15) for cell in CELLS]
    found = {}
    for chunks in CHUNKS:
        ratios = []
        for score in scores:
            flow = score.cell.dataflow(log_prob=log_prob)
            seconds = [
                step_seconds(simulate_events(flow, placed, chunks=chunks))
                for placed in (score.paper, *score.mapping.best)
            ]
            ratios.append(seconds[0] / min(seconds))
        rest = ", ".join(
            f"{score.cell.models}@{score.cell.num_gpus} {ratio:.2f}"
            for score, ratio in zip(scores, ratios)
            if ratio > 1.01
        )
        found[chunks] = sum(r <= 1.01 for r in ratios), sum(r <= 1.05 for r in ratios), rest
    return found


_Waits = dict[str, tuple[str, ...]]
_WAITS_FOR: _Waits = {"generate": (), "infer": ("generate",), "train": ("generate", "infer")}
_WAITS_FOR_AHEAD: _Waits = {"generate": (), "infer": (), "train": ("infer",)}


def _ready(
    dataflow: Dataflow, call: ModelCall, chunk: int, chunks: int, done: dict[tuple[str, int], float]
) -> float:
    """When a part's rows are there: generation before scoring, all scoring before updates.

    A generator one step ahead (one stage for all calls) made this step's rows in the step before.
    """
    ahead = len(dataflow.stages) == 1 and any(m.weights_from for m in dataflow.models)
    waits_for = _WAITS_FOR_AHEAD[call.kind] if ahead else _WAITS_FOR[call.kind]
    parts = range(chunks) if call.kind == "train" else (chunk,)
    return max((done.get((kind, part), 0.0) for kind in waits_for for part in parts), default=0.0)


def _seconds(pool: PlacedPool, number: int, chunk: int, parts: int) -> float:
    """Of one part; the transition before a generation is part of its first."""
    estimate = pool.estimates[number]
    once = estimate.parts.get("transition", 0.0)
    return (estimate.seconds - once) / parts + (once if chunk == 0 else 0.0)
