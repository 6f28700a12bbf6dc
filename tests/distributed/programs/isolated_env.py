"""Environments that a process of their own must contain, by the row's "does"; they ask nobody."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOLD = (
    "import time; kept = bytearray(b'x') * (100 << 20); print('held', flush=True); time.sleep(999)"
)


async def episode(row: dict[str, Any], **_: str) -> Any:
    """Does what the row says; returns its process and one that it started, if any."""
    does = row.get("does", "")
    facts = {"score": 1.0, "pid": float(os.getpid()), "random": random.random()}
    if does == "prints":
        print("a line", flush=True)
        raise ValueError("after a line")
    if does == "memory":
        kept = []
        while True:
            kept.append(b"x" * (1 << 20))
    if does == "memory of children":
        for _number in range(3):
            subprocess.Popen([sys.executable, "-c", HOLD])
        await asyncio.sleep(999)
    if does == "output":
        while True:
            print("flood " * 100)
    if does == "busy":
        while True:
            pass
    if does == "vanishes":
        os._exit(7)
    if does == "writes":
        for descriptor in range(3, 64):
            if "pipe" in os.path.realpath(f"/proc/self/fd/{descriptor}"):
                os.write(descriptor, b"garbage\n")
        await asyncio.sleep(999)
    if does == "forks":
        if os.fork() == 0:
            await asyncio.sleep(0)
        await asyncio.sleep(999)
    if does == "leaves children":
        facts["child"] = float(start_child())
        if os.fork() == 0:
            time.sleep(999)
    if does == "waits":
        write_pids(Path(row["path"]), start_child())
        await asyncio.sleep(999)
    return facts


def start_child() -> int:
    """Starts a program in a session of its own; its pid."""
    code = "import time; time.sleep(999)"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid


def write_pids(path: Path, child: int) -> None:
    """Writes this process's pid and the child's; the file is there only when it is complete."""
    part = path.with_suffix(".part")
    part.write_text(f"{os.getpid()} {child}")
    part.rename(path)
