"""`python -m spmdflow.status RUN_DIR`: what a live run does now, seen from another terminal.

Reads files in RUN_DIR only, so any node that shares the folder will do: status.json, which rank 0
rewrites every few seconds, metrics.jsonl, failure.json and the stacks. On a node of the run it also
asks the kernel for the state of its processes, so a rank 0 that stands is told from a slow disk.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from spmdflow.live import watch
from spmdflow.runtime.process import Process
from spmdflow.runtime.status_file import STATUS_FILE, WANTED_FILE
from spmdflow.tracking.progress import stage_seconds
from spmdflow.tracking.reading import RunFiles, failure_text, read_json

ALIVE, NOTHING = 0, 2
_OLD_SECONDS, _STACK_SECONDS = 20.0, 12.0
State = Mapping[str, Any]
"""The content of status.json (`Stalls.state` in runtime/stall.py)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the state of a run; exit code 2 if none is alive in RUN_DIR."""
    parser = argparse.ArgumentParser(prog="python -m spmdflow.status", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--stacks", action="store_true", help="let every rank write its stacks")
    parser.add_argument("--live", action="store_true", help="a panel, until the run ends")
    options = parser.parse_args(arguments)
    console = Console()
    if options.live and console.is_terminal:  # a log gets the lines below
        with suppress(KeyboardInterrupt):
            watch(options.run_dir, console)
    run_dir, state = options.run_dir, read_json(options.run_dir / STATUS_FILE)
    if options.stacks and state:
        _ask_for_stacks(run_dir, state)
    sys.stdout.write("\n".join(status_text(run_dir, state, time.time())) + "\n")
    return ALIVE if state else NOTHING


def status_text(run_dir: Path, state: State | None, now: float) -> Iterator[str]:
    """The lines to print; now: seconds since 1970."""
    yield _last_step(run_dir, now)
    files = RunFiles(run_dir)
    yield from (f"{name}: {failure_text(each)}" for name, each in files.failures.items())
    if not state:
        yield f"no run is alive: {run_dir / STATUS_FILE} is not there, expected in a live RUN_DIR"
    elif not files.failures:  # else what a run wrote while it was alive
        yield from _live(state, now)
    if files.stacks:
        yield f"stacks: {', '.join(files.stacks)}"


def _live(state: State, now: float) -> Iterator[str]:
    age = now - state["written"]
    if "planning" in state:
        yield f"{state['planning']}, told {age:.0f} s ago"
        return
    head = f"{len(state['ranks'])} ranks; rank {state['controller']}, the controller, wrote this"
    yield f"{head} {age:.0f} s ago" + (
        ": IT STANDS, or its disk does" if age > _OLD_SECONDS else ""
    )
    for rank, (*facts, silent) in state["ranks"].items():
        process = Process(*facts)
        if process.has_ended():
            yield f"rank {rank}: process {process.pid} has ended"
        elif process.is_stopped() or silent > _OLD_SECONDS:
            yield f"rank {rank}: {process.describe()}, was silent for {silent:.0f} s then"
    for first, *parts in state["calls"]:
        yield from (first, *(f"  {part}" for part in parts))
    yield from (f"slow: {text}" for text in state["slow"])
    yield "medians: " + ", ".join(f"{name} {s:.2g} s" for name, s in state["medians"].items())


def _last_step(run_dir: Path, now: float) -> str:
    path, records = run_dir / "metrics.jsonl", RunFiles(run_dir).metrics
    if not records:
        return f"{run_dir}: no step is done"
    last = records[-1]
    rate = last.get("perf/tokens_per_second")
    parts = [f"{name} {seconds:.2g} s" for name, seconds in stage_seconds(last).items()]
    parts = [f"{last.get('time/step_seconds', 0.0):.2g} s", *parts]
    parts += [f"{rate:.0f} tokens/s"] if rate else []
    ago = now - path.stat().st_mtime
    return f"{run_dir}: step {last['step']:.0f} done {ago:.0f} s ago ({', '.join(parts)})"


def _ask_for_stacks(run_dir: Path, state: State) -> None:
    """Signal the ranks of this node, let the controller ask the others, wait for the files."""
    asked = time.time()
    shown = [Process(*facts[:3]).show_stacks() for facts in state.get("ranks", {}).values()]
    if not all(shown):
        (run_dir / WANTED_FILE).touch()
    files = [run_dir / f"stacks-rank{rank}.txt" for rank in state.get("ranks", {})]
    while time.time() < asked + _STACK_SECONDS:
        if all(path.exists() and path.stat().st_mtime >= asked - 1.0 for path in files):
            return
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
