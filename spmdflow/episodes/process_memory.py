"""The memory of processes and of what they started, from /proc. Limits of one process."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

MB = 1 << 20


def limit_memory(memory_mb: int) -> None:
    """Limits the writable memory of this process to what it has and so many MB more."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    used = int(status.partition("VmData:")[2].split()[0]) * 1024
    limit = used + memory_mb * MB
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def children_of_all() -> dict[int, list[int]]:
    """The children of every process of this machine that can be seen, by pid."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
            parent = int(text.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    return children


def descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    """The children of a process, their children, and so on; not the process itself."""
    found: list[int] = []
    waiting = list(children.get(pid, []))
    while waiting:
        child = waiting.pop()
        found.append(child)
        waiting += children.get(child, [])
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, with what it shares; 0 if it has ended."""
    with contextlib.suppress(OSError):
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * resource.getpagesize()
    return 0


def shared_out_bytes(pid: int) -> int:
    """Resident memory of a process where each page counts 1/n for n processes that share it.

    Slower than `resident_bytes`, which is the answer where this cannot be read.
    """
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        for line in text.splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return resident_bytes(pid)
