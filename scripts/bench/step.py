"""One step of a run taken apart: what each rank did in each stage, by RUN_DIR/trace.json.

One row for each stage (a call of the script) and rank, medians over the steps but the first:

    wait_s      the rank did nothing before the stage began
    compute_s   the stage ran here, with its collectives and its waiting for rows
    behind_s    later than the first rank that ended the stage
    bytes       of the stage's rows that this rank received from others

The last row is what passed between the last stage of a step and the first of the next one. Of
seconds that several rows share (ranks work at once), none may be added up but along one rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

BETWEEN = "between steps"
Key = tuple[str, int]
"""Stage and rank."""


class Stretch(NamedTuple):
    """One event of trace.json."""

    lane: str
    stage: str
    rank: int
    step: int
    start: float
    end: float
    num_bytes: int


class Part(NamedTuple):
    """A stage on a rank in one step, in seconds and bytes."""

    wait: float = 0.0
    compute: float = 0.0
    behind: float = 0.0
    num_bytes: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run, and which of its steps."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=int, metavar="N", help="this one instead of the median")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each stage and rank, in the order in which stages begin."""
    steps = taken_apart(read(arguments.run_dir / "trace.json"))
    chosen = list(steps)[1:] or list(steps)
    if arguments.step is not None:
        chosen = [arguments.step]
    if not chosen or not set(chosen) <= set(steps):
        sys.exit(
            f"step: got step {arguments.step} of {arguments.run_dir}, expected one of "
            f"{list(steps)}; choose one that the run finished"
        )
    keys = dict.fromkeys(key for number in chosen for key in steps[number])
    rows = []
    for stage, rank in sorted(keys, key=lambda key: key[0] == BETWEEN):
        parts = [steps[number].get((stage, rank), Part()) for number in chosen]
        wait, compute, behind, num_bytes = map(statistics.median, zip(*parts))
        rows.append({"stage": stage, "rank": rank, "wait_s": wait, "compute_s": compute})
        rows[-1] |= {"behind_s": behind, "bytes": int(num_bytes)}
    return rows


def read(trace: Path) -> list[Stretch]:
    """The events that have a duration, by time."""
    events = json.loads(trace.read_text())
    lanes = {(x["pid"], x["tid"]): x["args"]["name"] for x in events if x["name"] == "thread_name"}
    found = [
        Stretch(
            lanes[x["pid"], x["tid"]],
            *(x["name"], x["pid"], x["args"]["step"]),
            *(x["ts"] / 1e6, (x["ts"] + x["dur"]) / 1e6),
            x["args"].get("bytes", 0),
        )
        for x in events
        if x["ph"] == "X" and "step" in x.get("args", {})
    ]
    return sorted(found, key=lambda stretch: stretch.start)


def taken_apart(stretches: list[Stretch]) -> dict[int, dict[Key, Part]]:
    """By step, stage and rank; a stage that a step has twice is added up."""
    computing = [x for x in stretches if x.lane == "compute"]
    steps: dict[int, dict[Key, Part]] = {x.step: {} for x in computing}
    turns = Counter[tuple[int, str, int]]()
    calls = []
    for each in computing:
        calls.append((each.step, each.stage, turns[each.step, each.stage, each.rank]))
        turns[each.step, each.stage, each.rank] += 1
    ends: dict[tuple[int, str, int], float] = {}
    for each, call in zip(computing, calls):
        ends[call] = min(ends.get(call, each.end), each.end)
    last: dict[int, Stretch] = {}
    for each, call in zip(computing, calls):
        before = last.get(each.rank)
        found = steps[each.step]
        if before is not None and before.step != each.step:
            found[BETWEEN, each.rank] = Part(wait=each.start - before.end)
        wait = each.start - before.end if before and before.step == each.step else 0.0
        behind = each.end - ends[call]
        found[each.stage, each.rank] = _add(
            found.get((each.stage, each.rank)),
            Part(wait, each.end - each.start, behind),
        )
        last[each.rank] = each
    received: dict[tuple[int, str, int], int] = defaultdict(int)
    for each in stretches:
        if each.lane == "transfer":
            received[each.step, each.stage.partition(" of ")[2], each.rank] += each.num_bytes
    for (step, stage, rank), size in received.items():
        part = Part(num_bytes=size)
        steps[step][stage, rank] = _add(steps[step].get((stage, rank)), part)
    return steps


def _add(one: Part | None, other: Part) -> Part:
    return other if one is None else Part(*map(sum, zip(one, other)))
