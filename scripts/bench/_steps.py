"""Seconds and CPU seconds of each step of a program that writes a line to a file after each.

CPU seconds are of the program and all its descendants (/proc, in ticks of 10 ms): what is left of a
comparison on a machine that others use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_LOOK_SECONDS = 0.02
_MEMORY_SECONDS = 0.5
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Moment(NamedTuple):
    """When a step ended, or seconds between two ends."""

    wall: float
    cpu: float


@dataclass
class Watched:
    """What was seen of a program."""

    steps: list[Moment]
    """Of each step but the first, from the end of the one before."""
    peak_bytes: int
    """Largest memory of all its processes together, where memory that several share counts once
    (proportional set size), as seen twice a second."""


def run_watched(
    command: Sequence[str], lines: Path, log: Path, *, cwd: Path, more: Mapping[str, str]
) -> Watched:
    """Run a command to its end; return its steps and its largest memory.

    lines: the file that grows by a line after each step. Exits with the log's end if it fails.
    """
    moments: list[Moment] = []
    peak_bytes = 0
    next_look = 0.0
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | more, cwd=cwd, stdout=output, stderr=output
        )
        while process.poll() is None:
            time.sleep(_LOOK_SECONDS)
            if time.perf_counter() >= next_look:
                peak_bytes = max(peak_bytes, memory_bytes(process.pid))
                next_look = time.perf_counter() + _MEMORY_SECONDS
            if lines.exists() and lines.read_bytes().count(b"\n") > len(moments):
                moments.append(Moment(time.perf_counter(), cpu_seconds(process.pid)))
    if process.returncode:
        text = log.read_text()[-4000:]
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}\n{text}")
    steps = []
    for soon, late in zip(moments, moments[1:]):
        steps.append(Moment(late.wall - soon.wall, late.cpu - soon.cpu))
    return Watched(steps, peak_bytes)


def cpu_seconds(pid: int) -> float:
    """Of a process and its descendants, those that have ended and were waited for included."""
    ticks_by_process = {}
    parents = {}
    for process, fields in _processes():
        parents[process] = int(fields[1])
        ticks_by_process[process] = sum(map(int, fields[11:15]))
    total = 0
    for process in _family(pid, parents):
        total += ticks_by_process[process]
    return total * _TICK


def memory_bytes(pid: int) -> int:
    """Of a process and its descendants together; memory that several map counts once."""
    parents = {process: int(fields[1]) for process, fields in _processes()}
    total = 0
    for process in _family(pid, parents):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        for line in text.splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Each process with the fields of /proc/PID/stat behind its name."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            yield int(folder.name), text.rpartition(")")[2].split()


def _family(pid: int, parents: Mapping[int, int]) -> set[int]:
    """A process and its descendants among those with known parents."""
    family = {pid} & parents.keys()
    grown = True
    while grown:
        children = {each for each, parent in parents.items() if parent in family} - family
        family |= children
        grown = bool(children)
    return family
