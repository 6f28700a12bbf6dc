"""Seconds and CPU seconds of each step of a program that writes a line to a file after each.

CPU seconds are of the program and all its descendants (/proc, in ticks of 10 ms): what is left of a
comparison on a machine that others use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_LOOK_SECONDS = 0.02
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Moment(NamedTuple):
    """When a step ended, or seconds between two ends."""

    wall: float
    cpu: float


def run_watched(
    command: Sequence[str], lines: Path, log: Path, *, cwd: Path, more: Mapping[str, str]
) -> list[Moment]:
    """Run a command to its end; of each step but the first, from the end of the one before.

    lines: the file that grows by a line after each step. Exits with the log's end if it fails.
    """
    moments: list[Moment] = []
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | more, cwd=cwd, stdout=output, stderr=output
        )
        while process.poll() is None:
            time.sleep(_LOOK_SECONDS)
            if lines.exists() and lines.read_bytes().count(b"\n") > len(moments):
                moments.append(Moment(time.perf_counter(), cpu_seconds(process.pid)))
    if process.returncode:
        text = log.read_text()[-4000:]
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}\n{text}")
    pairs = zip(moments, moments[1:])
    return [Moment(late.wall - soon.wall, late.cpu - soon.cpu) for soon, late in pairs]


def cpu_seconds(pid: int) -> float:
    """Of a process and its descendants, those that have ended and were waited for included."""
    parents: dict[int, tuple[int, int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            fields = text.rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    own = {pid}
    total = 0
    grown = True
    while grown:
        more = {each for each, (parent, _) in parents.items() if parent in own} - own
        own |= more
        grown = bool(more)
    total = sum(ticks for each, (_, ticks) in parents.items() if each in own)
    return total * _TICK
