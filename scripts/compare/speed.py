"""Seconds of two commits, measured alternately. Run it on an idle machine only.

    calls      round trips of a call that does nothing (bench.py rpc)
    transfers  round trips of rows between two pools (bench.py transfer)
    step       a GRPO step as bench.py trl measures it, without TRL; needs SPMDFLOW_DATA

Each round runs a measurement at the old commit and at once at the new one, or the other way round
in every second round. Each commit runs its own scripts/bench.py. The table has the medians over
rounds and their ratio; a ratio above the limit fails.

A call passes from thread to thread several times. Where the system spreads these threads over the
two cores of a virtual machine, one and the same program took twice as long from one start to the
next. With --one-core it cannot; single rounds still differ by a third, so take several.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compare.checkout import Checkout, end_of_log, run_program

WITHIN = "within the limit"
ABOVE = "above the limit"
PASSED = (WITHIN,)
BENCHES = {
    "calls": ("rpc", ("kind", "ranks"), "p50_ms"),
    "transfers": ("transfer", ("payload",), "p50_ms"),
    "step": ("trl", ("way",), "step_s"),
}
"""Measurement -> NAME of bench.py, columns that name a row, column that is compared."""
_SECONDS = 1800.0
"""Limit of one measurement of one commit."""

Row = dict[str, Any]
Values = Mapping[str, list[float]]
"""Name of a row -> its value in each round."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, how often, and what is allowed."""
    parser.add_argument("--measure", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.05, help="largest ratio, new by old")
    parser.add_argument(
        "--one-core", action="store_true", help="keep all processes on one core: steadier calls"
    )
    parser.add_argument("--brief", action="store_true", help="few calls and steps, for a try")


def compare(arguments: argparse.Namespace, old: Checkout, new: Checkout, folder: Path) -> list[Row]:
    """A row for each number that a bench prints."""
    load = os.getloadavg()[0]
    print(f"load average of the last minute: {load:.2f} (an idle machine has less than 0.5)")
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # inherited by what is measured
    if "step" in arguments.measure and "SPMDFLOW_DATA" not in os.environ:
        sys.exit("compare_commits speed: set SPMDFLOW_DATA, or leave step out of --measure")
    rows = []
    for name in arguments.measure:
        values: dict[str, dict[str, list[float]]] = {
            "old": defaultdict(list),
            "new": defaultdict(list),
        }
        for number in range(arguments.rounds):
            sides = [("old", old), ("new", new)]
            if number % 2:
                sides.reverse()
            for side, checkout in sides:
                print(f"round {number + 1} of {arguments.rounds}: {name}, {side}", flush=True)
                measured = measure(name, checkout, folder / side, is_brief=arguments.brief)
                for key, value in measured.items():
                    values[side][key].append(value)
        rows += compare_values(name, values["old"], values["new"], limit=arguments.limit)
    return rows


def measure(name: str, checkout: Checkout, folder: Path, *, is_brief: bool) -> dict[str, float]:
    """Run a bench of the checkout once. Name of a row -> its number."""
    folder.mkdir(parents=True, exist_ok=True)
    bench, keys, column = BENCHES[name]
    out = folder / f"{bench}.json"
    log = folder / f"{bench}.log"
    words = ["scripts/bench.py", bench, "--json", str(out), *_options(bench, is_brief=is_brief)]
    status = run_program(checkout, words, log, seconds=_SECONDS)
    if status != 0:
        sys.exit(f"compare_commits speed: {words} ended with status {status}\n{end_of_log(log)}")
    return read_rows(json.loads(out.read_text())["rows"], keys, column)


def _options(bench: str, *, is_brief: bool) -> list[str]:
    """Further words of bench.py."""
    options = []
    if bench == "trl":
        options = ["--only", "spmdflow", "--settings", "stories", "--rounds", "1"]
        options += ["--steps", "3"] if is_brief else ["--steps", "8"]
    if bench == "rpc":
        options = ["--simulated", "4", "64"]
        options += ["--calls", "100", "--ranks", "1"] if is_brief else ["--ranks", "1", "4"]
    return options


def read_rows(rows: Sequence[Row], keys: Sequence[str], column: str) -> dict[str, float]:
    """Rows of bench.py -> their number by a name made of the key columns."""
    values = {}
    for row in rows:
        name = " ".join(str(row[key]) for key in keys)
        values[name] = float(row[column])
    return values


def compare_values(name: str, old: Values, new: Values, *, limit: float) -> list[Row]:
    """Medians, their ratio and the verdict, for every row that both commits have."""
    rows = []
    for key in old:
        if key not in new:
            continue
        before = statistics.median(old[key])
        after = statistics.median(new[key])
        ratio = after / before
        rows.append(
            {
                "measure": f"{name}, {key}",
                "column": BENCHES[name][2],
                "rounds": len(old[key]),
                "old": before,
                "new": after,
                "ratio": ratio,
                "result": WITHIN if ratio <= limit else ABOVE,
            }
        )
    return rows
