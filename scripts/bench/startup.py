"""Seconds from torchrun to the first step on CPU ranks, by stage; CPU seconds of all processes.

One row for each stage, medians over the runs: since torchrun began, on the last rank that reached
it, and CPU seconds that one rank had taken by then. The last row is the end of the first step, with
the CPU seconds of all processes, torchrun and worker processes of rewards among them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARKS = ("torch", "tensordict", "transformers", "vllm", "torch._dynamo")
_RANK = f"""
import gc, os, runpy, sys, time
file = os.open(os.environ["STARTUP_MARKS"], os.O_WRONLY | os.O_APPEND)
def mark(name):
    os.write(file, f"{{name}}\\t{{time.time()}}\\t{{time.process_time()}}\\n".encode())
left = set({MARKS})
def hook(event, arguments):
    if event == "import" and arguments[0] in left:
        left.remove(arguments[0])
        mark(f"imports {{arguments[0]}}")
sys.addaudithook(hook)
mark("rank's first line")
runpy.run_module("spmdflow.run", run_name="__main__", alter_sys=True)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is started, and how often."""
    parser.add_argument("--ranks", type=int, default=4, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="R")
    parser.add_argument("--script", default=str(ROOT / "algos" / "grpo.py"))
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the script")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each stage, in their order."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(arguments.repeats):
        for stage, times in one_run(arguments).items():
            found[stage].append(times)
    rows = []
    for stage, runs in found.items():
        seconds, cpu = (statistics.median(values) for values in zip(*runs))
        rows.append({"stage": stage, "seconds": seconds, "cpu_s": cpu or None})
    return sorted(rows, key=lambda row: float(row["seconds"]))


def one_run(arguments: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """(seconds since the start, CPU seconds) by stage."""
    with tempfile.TemporaryDirectory() as folder:
        rank, marks, run_dir = (Path(folder) / name for name in ("rank.py", "marks", "run"))
        rank.write_text(_RANK)
        marks.touch()
        command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone")]
        command += [f"--nproc-per-node={arguments.ranks}", str(rank), arguments.script]
        command += ["total_steps=1", f"run.dir={run_dir}", *arguments.settings]
        more = {"STARTUP_MARKS": str(marks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.time()
        done = subprocess.run(
            command, env=os.environ | more, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            sys.exit(f"startup: the run failed\n{done.stderr[-4000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found: dict[str, tuple[float, float]] = {}
        for line in marks.read_text().splitlines():
            name, at, cpu = line.split("\t")
            found[name] = max(found.get(name, (0.0, 0.0)), (float(at) - began, float(cpu)))
        ends = dict[str, float]()
        for event in json.loads((run_dir / "trace.json").read_text()):
            if event["ph"] == "X":
                step = event.get("args", {}).get("step", 0)
                start = event["ts"] / 1e6 - began
                name = "end of the first step" if step else f"end of {event['name']}"
                ends[name] = max(ends.get(name, 0.0), start + event["dur"] / 1e6)
                if step:
                    first = ends.get("begin of the first step", start)
                    ends["begin of the first step"] = min(first, start)
        found |= {name: (at, 0.0) for name, at in ends.items()}
        total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found["end of torchrun"] = (time.time() - began, total)
        return found
