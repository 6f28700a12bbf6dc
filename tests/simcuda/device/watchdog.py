"""Ends a process whose collective cannot end, with the ranks that are missing.

Each rank writes what it waits for into a file of SIMCUDA_STATE, a folder of the whole run, and
reads the others' files. An operation hangs if this rank has waited in it for SIMCUDA_HANG_SECONDS
(45) and no other member does anything about it: each waits in an operation for as long, has ended,
or has hardly wanted a processor for as long. A rank that computes, or would if a processor were
free, is waited for, so that a busy machine gives no verdict.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import surface

EXIT_CODE = 86
_IDLE_SHARE = 0.1
"""Of a processor: heartbeats and polls need less."""
State = Mapping[str, Any]
"""rank; idle: seconds without work; waiting: entries of operations; started: how many by key."""


def start() -> None:
    """Watch this process, if the run has a folder for it. A second call does nothing."""
    folder = os.environ.get("SIMCUDA_STATE")
    name = "simulated nccl watchdog"
    if folder and all(thread.name != name for thread in threading.enumerate()):
        limit = float(os.environ.get("SIMCUDA_HANG_SECONDS", "45"))
        arguments = (Path(folder), limit)
        threading.Thread(target=_watch, args=arguments, name=name, daemon=True).start()


def _watch(folder: Path, limit: float) -> None:
    pause = min(2.0, limit / 5)
    seen_at = busy_at = time.monotonic()
    wanted = _wanted_seconds()
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        time.sleep(pause)
        now = time.monotonic()
        more = _wanted_seconds() - wanted
        if not 0 <= more <= _IDLE_SHARE * (now - seen_at):  # below 0: a thread has ended
            busy_at = now
        seen_at = now
        wanted += more
        mine = _own_state(now - busy_at)
        path = folder / f"{mine['rank']}.json"
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(mine))
        scratch.rename(path)
        if any(entry["seconds"] > limit for entry in mine["waiting"]):
            if text := verdict(mine, _read(folder), limit):
                sys.stderr.write(f"simulated NCCL: {text}\n")
                sys.stderr.flush()
                os._exit(EXIT_CODE)


def _wanted_seconds() -> float:
    """How long this process has run on processors, or waited for one."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            running, waiting, _ = path.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
        total += int(running) + int(waiting)
    return total / 1e9


def _own_state(idle: float) -> State:
    waiting = []
    for group, op, number, peer, thread, seconds in surface.native.waiting():
        entry = {"group": group, "op": op, "number": number, "peer": peer, "seconds": seconds}
        # a frame that is kept would keep the tensors of its function
        waiting.append(entry | {"line": surface.line_of(sys._current_frames().get(thread))})
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return {
        "rank": rank,
        "pid": os.getpid(),
        "idle": idle,
        "waiting": waiting,
        "started": surface.native.started(),
    }


def _read(folder: Path) -> dict[int, State]:
    found = {}
    for path in folder.glob("*.json"):
        state = json.loads(path.read_text())
        found[state["rank"]] = state
    return found


def verdict(mine: State, states: Mapping[int, State], limit: float) -> str:
    """What hangs and who is missing; "" as long as somebody may still come."""
    for entry in mine["waiting"]:
        if entry["seconds"] <= limit:
            continue
        members = json.loads(entry["group"].rpartition(":")[2])
        expected = members
        if entry["peer"] >= 0:
            expected = [members[entry["peer"]]]
        others = [rank for rank in expected if rank != mine["rank"]]
        if all(_is_stuck(states.get(rank), limit) for rank in others):
            return _text(mine, entry, members, others, states)
    return ""


def _is_stuck(state: State | None, limit: float) -> bool:
    """Whether a rank will start nothing more. One that is not known yet may."""
    if state is None:
        return False
    if not _is_alive(state["pid"]):
        return True
    return state["idle"] > limit or any(entry["seconds"] > limit for entry in state["waiting"])


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _text(
    mine: State,
    entry: Mapping[str, Any],
    members: Sequence[int],
    others: Sequence[int],
    states: Mapping[int, State],
) -> str:
    missing = [rank for rank in others if not _has_come(states[rank], entry, members, mine["rank"])]
    lines = [
        f"{entry['op']} number {entry['number']} on {entry['group']} hangs on rank {mine['rank']} "
        f"at {entry['line']} for {entry['seconds']:.0f} s: "
    ]
    if missing:
        lines[0] += f"ranks {missing} have not started it"
    else:
        lines[0] += "all ranks have started it, in operations that do not fit together"
    for rank in others:
        lines.append(f"  rank {rank}: {_doing(states[rank])}")
    return "\n".join(lines)


def _has_come(state: State, entry: Mapping[str, Any], members: Sequence[int], own: int) -> bool:
    """Whether the other rank has started its part of an operation."""
    if entry["op"].startswith("first use"):
        return any(each["group"] == entry["group"] for each in state["waiting"])
    key = entry["group"]
    if entry["peer"] >= 0:
        other = {"send": "recv", "recv": "send"}[entry["op"]]
        key = f"{key}|{other}|{members.index(own)}"
    return bool(state["started"].get(key, 0) >= entry["number"])


def _doing(state: State) -> str:
    if not _is_alive(state["pid"]):
        return "has ended"
    if not state["waiting"]:
        return f"has done nothing for {state['idle']:.0f} s"
    entry = max(state["waiting"], key=lambda each: each["seconds"])
    where = f"on {entry['group']} at {entry['line']} for {entry['seconds']:.0f} s"
    return f"waits in {entry['op']} number {entry['number']} {where}"
