"""Processes as Linux shows them: identity, life, end. Knows no ranks and no messages.

A pid alone can be reused, so a process is a pid with its start time; a `pidfd` becomes readable
the moment the process ends, whoever its parent is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.5
_UNKNOWN = "?"


@dataclass(frozen=True)
class Process:
    """One process of one machine."""

    pid: int
    start_ticks: int
    """Start in clock ticks since boot: tells a reused pid from the process that was meant."""
    node: str
    """Equal where pids mean the same processes (`node_identity`)."""

    @classmethod
    def current(cls) -> Process:
        """The calling process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now."""
        return cls(pid, _start_ticks(pid) or 0, node_identity())

    def is_local(self) -> bool:
        """Whether this process can be watched and killed from here."""
        return self.node == node_identity()

    def state(self) -> str | None:
        """R, S, D (alive), T or t (stopped), Z (zombie); None if gone or elsewhere.

        "?" if this process cannot look (out of descriptors): that says nothing about the other.
        """
        if not self.is_local():
            return None
        try:
            fields = _stat_fields(self.pid)
        except OSError:
            return _UNKNOWN
        is_same = fields is not None and int(fields[19]) == self.start_ticks
        return fields[0] if fields and is_same else None

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.state() in ("T", "t")

    def has_ended(self) -> bool:
        """Whether it is known to be gone (a zombie is gone); False for other machines."""
        return self.is_local() and self.state() in (None, "Z", "X")

    def end_cause_or_none(self, seconds: float = 0.0) -> str | None:
        """How it ended, such as "killed by SIGKILL"; only known until its parent asks.

        Waits up to seconds for an end that has begun (its connections close a moment earlier).
        """
        until = time.monotonic() + seconds
        while self.is_local() and not self.has_ended() and time.monotonic() < until:
            time.sleep(0.001)
        with contextlib.suppress(OSError):
            fields = _stat_fields(self.pid) if self.state() == "Z" else None
            return describe_status(int(fields[-1])) if fields else None
        return None

    def pidfd_or_none(self) -> int | None:
        """A descriptor that is readable once the process ended; close it. None if ended."""
        if self.has_ended() or not self.is_local():
            return None
        try:
            return os.pidfd_open(self.pid)
        except OSError:
            return None

    def kill(self) -> bool:
        """SIGKILL; False if it had ended or lives on another machine."""
        if not self.is_local() or self.has_ended():
            return False
        try:
            os.kill(self.pid, signal.SIGKILL)
        except OSError:
            return False
        return True


def describe_status(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with status {os.waitstatus_to_exitcode(status)}"


@cache
def node_identity() -> str:
    """Names the boot, pid namespace, machine id and host name of this process.

    Machines restored from one snapshot share the first two, and may share the third.
    """
    texts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with contextlib.suppress(OSError):  # containers may have no machine id
            texts.append(Path(path).read_text(encoding="ascii").strip())
    return "/".join([*texts, os.readlink("/proc/self/ns/pid"), os.uname().nodename])


def allow_open_files() -> None:
    """Raise the limit of open descriptors as far as this process may.

    A controller needs several for each rank, and 1,024 are the usual limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descendants(pid: int) -> list[int]:
    """Pids of all processes below pid, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(pid, []))
    for child in found:
        found.extend(children.get(child, []))
    return found


def dump_stacks(path: Path) -> None:
    """Write the Python stack of every thread to path; never raises for a bad disk."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)


def leave(status: int) -> None:
    """End this process and everything it started, now, whatever its threads are doing.

    Nothing that fails on the way, such as a /proc that cannot be read, keeps it from ending.
    """
    try:
        flusher = threading.Thread(target=_flush, daemon=True)  # a full pipe must not hold us
        flusher.start()
        for child in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        flusher.join(_FLUSH_SECONDS)
    finally:
        os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _start_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third (state) on; None if there is no such process.

    OSError if it cannot be read for another reason.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
