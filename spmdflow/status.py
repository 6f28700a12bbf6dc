"""Show what a live run is doing: `python -m spmdflow.status RUN_DIR`, from another terminal.

It reads only files in RUN_DIR, so it works on any node that shares the folder: status.json, which
rank 0 rewrites every few seconds, metrics.jsonl, failure.json, the stacks, and what ranks report
about generation servers. On a node of the run it also asks the kernel for the state of the
processes, to distinguish a stuck rank 0 from a slow disk.

A run is live while its rank 0 holds the lock of RUN_DIR. Exit codes:

    0  a run is live
    1  the last run failed or was killed
    2  no run has used this folder, or the command line is wrong
    3  the last run was stopped and can be resumed
    4  the last run finished
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

from spmdflow.checkpoint.lock import STATUS_FILE
from spmdflow.failure.process import Process
from spmdflow.failure.status_file import WANTED_FILE
from spmdflow.live import watch
from spmdflow.tracking.progress import stage_seconds
from spmdflow.tracking.reading import RunFiles, RunState, failure_text, read_json
from spmdflow.tracking.servers import ServerRecord

LIVE, FAILED, NOTHING, STOPPED, FINISHED = range(5)
EXIT_CODES = {
    RunState.LIVE: LIVE,
    RunState.FAILED: FAILED,
    RunState.KILLED: FAILED,
    RunState.NONE: NOTHING,
    RunState.STOPPED: STOPPED,
    RunState.FINISHED: FINISHED,
}
_PARTS = {"ranks", "controller", "calls", "slow", "medians"}
_OLD_SECONDS = 20.0
_STACK_SECONDS = 12.0
_MOST_MEDIANS = 5
_MOST_SERVERS = 64
Status = Mapping[str, Any]
"""The content of status.json (`StallWatch.status` in failure/stall.py)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the state of a run and return its exit code (see the module docstring).

    --live redraws until the run ends, on a terminal only; --stacks makes all ranks of a live run
    write their stacks first. arguments: default: sys.argv.
    """
    parser = argparse.ArgumentParser(
        prog="python -m spmdflow.status",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument(
        "--stacks", action="store_true", help="make every rank write its stacks to RUN_DIR"
    )
    parser.add_argument(
        "--live", action="store_true", help="redraw every second until the run ends"
    )
    options = parser.parse_args(arguments)
    console = Console()
    if options.live and console.is_terminal:  # a log gets the plain lines below
        with suppress(KeyboardInterrupt):
            watch(options.run_dir, console)
    run_dir = options.run_dir
    status = read_json(options.run_dir / STATUS_FILE)
    run_state = RunFiles(run_dir).run_state
    if options.stacks and run_state is RunState.LIVE:
        _ask_for_stacks(run_dir, status)
    sys.stdout.write("\n".join(status_text(run_dir, run_state, status, time.time())) + "\n")
    return EXIT_CODES[run_state]


def status_text(run_dir: Path, run_state: RunState, status: Status, now: float) -> Iterator[str]:
    """Yield the lines to print: last step, failures, the live run, its servers, files of stacks.

    status: content of status.json, {} without one. now: Unix time.
    """
    yield _last_step(run_dir, now)
    files = RunFiles(run_dir)
    yield from (f"{name}: {failure_text(each)}" for name, each in files.failures.items())
    if run_state is not RunState.LIVE:
        yield f"no run is live: {run_state.value}"
    elif not is_status(status):
        yield f"a run is live, but {run_dir / STATUS_FILE} has no valid content (yet)"
    else:
        yield from _live(status, now)
    if run_state is RunState.LIVE:
        yield from _servers(files.servers, now)
    if files.stacks:
        yield f"stacks: {', '.join(files.stacks)}"


def is_status(status: Status) -> bool:
    """Whether an object is the complete status of a run or of a planning."""
    if not isinstance(status.get("written"), int | float):
        return False
    return "planning" in status or _PARTS <= status.keys()


def _live(state: Status, now: float) -> Iterator[str]:
    """Yield lines about a live run: its ranks, running calls, slow ranks, longest calls.

    A running call has its ranks. The longest calls are the five with the longest medians.

    Ranks are listed only if their process has ended or is stopped, or if they had sent nothing for
    20 s. A planning run has one line. A status older than 20 s means that the controller or its
    disk is stuck.
    """
    age = now - state["written"]
    if "planning" in state:
        yield f"{state['planning']} (as of {age:.0f} s ago)"
        return
    head = f"{len(state['ranks'])} ranks; rank {state['controller']} (controller) wrote this"
    if age > _OLD_SECONDS:
        yield f"{head} {age:.0f} s ago: IT IS STUCK, or its disk is"
    else:
        yield f"{head} {age:.0f} s ago"
    for rank, (*facts, silent) in state["ranks"].items():
        process = Process(*facts)
        if process.has_ended():
            yield f"rank {rank}: process {process.pid} has ended"
        elif process.is_stopped() or silent > _OLD_SECONDS:
            yield f"rank {rank}: {process.describe()}; it had been silent for {silent:.0f} s"
    for first, *parts in state["calls"]:
        yield from (first, *(f"  {part}" for part in parts))
    yield from (f"slow: {text}" for text in state["slow"])
    longest = sorted(state["medians"].items(), key=lambda median: -median[1])[:_MOST_MEDIANS]
    yield "longest calls: " + ", ".join(f"{name} {s:.2g} s" for name, s in longest)


def _servers(servers: Sequence[ServerRecord], now: float) -> Iterator[str]:
    """Yield a line for each generation server that a rank has reported, at most 64."""
    for server in servers[:_MOST_SERVERS]:
        reason = f"; {server.reason_text}" if server.reason else ""
        yield (
            f"server {server.url_text}: {server.state}, weights version {server.weights_version}, "
            f"{server.running_rows} rows running, {server.restarts} restarts, "
            f"{server.recomputed_tokens} tokens recomputed "
            f"(rank {server.rank}, {now - server.time:.0f} s ago){reason}"
        )
    if len(servers) > _MOST_SERVERS:
        yield f"{len(servers) - _MOST_SERVERS} more servers"


def _last_step(run_dir: Path, now: float) -> str:
    """Return a line about the last finished step: number, age, seconds by stage, tokens/s.

    Its age is that of metrics.jsonl. If no step has finished, the line says so.
    """
    path = run_dir / "metrics.jsonl"
    records = RunFiles(run_dir).metrics
    if not records:
        return f"{run_dir}: no step has finished"
    last = records[-1]
    rate = last.get("perf/tokens_per_second")
    parts = []
    for name, seconds in stage_seconds(last).items():
        parts.append(f"{name} {seconds:.2g} s")
    parts = [f"{last.get('time/step_seconds', 0.0):.2g} s", *parts]
    parts += [f"{rate:.0f} tokens/s"] if rate else []
    ago = now - path.stat().st_mtime
    return f"{run_dir}: step {last['step']:.0f} finished {ago:.0f} s ago ({', '.join(parts)})"


def _ask_for_stacks(run_dir: Path, state: Status) -> None:
    """Make all ranks write their stacks to files, and wait for these for up to 12 s.

    Ranks on this node get a signal. For others a file in RUN_DIR asks the controller.
    """
    start = time.time()
    shown = []
    for facts in state.get("ranks", {}).values():
        shown.append(Process(*facts[:3]).show_stacks())
    if not all(shown):
        (run_dir / WANTED_FILE).touch()
    files = []
    for rank in state.get("ranks", {}):
        files.append(run_dir / f"stacks-rank{rank}.txt")
    while time.time() < start + _STACK_SECONDS:
        if all(path.exists() and path.stat().st_mtime >= start - 1.0 for path in files):
            return
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
