"""Processes as Linux shows them: identity, state, how they ended, and signals to them.

A pid alone can be reused, so a process is a pid with its start time. A `pidfd` becomes readable
the moment the process ends, whoever its parent is. Knows no messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.5
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank of a session write its stacks. No library is known to use this signal."""
STATES = {"R": "running", "S": "sleeping", "D": "uninterruptible: it waits for a disk or a device"}
STATES |= {"T": "stopped", "t": "stopped by a debugger"}
"""What the letters of `Process.state` mean."""
_UNKNOWN = "?"


@dataclass(frozen=True)
class Process:
    """One process of one node."""

    pid: int
    start_ticks: int
    """Start in clock ticks since boot. It differs if the pid was reused by another process."""
    node: str
    """Equal for processes that share one table of pids (`node_identity`)."""

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now."""
        fields = _stat_fields(pid)
        return cls(pid, int(fields[19]) if fields else 0, node_identity())

    def age_seconds(self) -> float:
        """Seconds since the process started. It must run on this node."""
        began = self.start_ticks / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began

    def is_local(self) -> bool:
        """Whether this process can be watched and killed from here."""
        return self.node == node_identity()

    def state(self) -> str | None:
        """Return the letter of its state in /proc: R, S, D (alive), T or t (stopped), Z (zombie).

        None if it is gone, on another node, or its pid belongs to another process now. "?" if /proc
        cannot be read, for example because this process has no free descriptors.
        """
        if not self.is_local():
            return None
        try:
            fields = _stat_fields(self.pid)
        except OSError:
            return _UNKNOWN
        is_same = fields is not None and int(fields[19]) == self.start_ticks
        if fields and is_same:
            return fields[0]
        return None

    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger."""
        return self.state() in ("T", "t")

    def describe(self) -> str:
        """Return such as "process 12 is sleeping (state S)", "process 12 is on another node".

        "process 12 has an unknown state" if it has ended or cannot be read.
        """
        state = self.state()
        if state in STATES:
            known = f"is {STATES[state]} (state {state})"
        else:
            known = "has an unknown state"
        return f"process {self.pid} {known if self.is_local() else 'is on another node'}"

    def has_ended(self) -> bool:
        """Whether it is known to be gone (a zombie is gone); False on other nodes."""
        return self.is_local() and self.state() in (None, "Z", "X")

    def end_cause_or_none(self, seconds: float = 0.0) -> str | None:
        """Return how it ended: "killed by SIGKILL" or "exited with status 1"; None if not known.

        Waits up to `seconds` for it to end, because a process closes its connections a moment
        earlier. The status is known only while it is a zombie of this node, until its parent has
        read it.
        """
        until = time.monotonic() + seconds
        while self.is_local() and not self.has_ended() and time.monotonic() < until:
            time.sleep(0.001)
        with contextlib.suppress(OSError):
            fields = _stat_fields(self.pid) if self.state() == "Z" else None
            if fields:
                return describe_status(int(fields[-1]))
            return None
        return None

    def pidfd_or_none(self) -> int | None:
        """Return a descriptor that becomes readable when the process ends; the caller closes it.

        None if it has ended, is on another node, or cannot be opened.
        """
        if self.has_ended() or not self.is_local():
            return None
        try:
            return os.pidfd_open(self.pid)
        except OSError:
            return None

    def kill(self) -> bool:
        """Send SIGKILL. False if the process has ended or is on another node."""
        return self._send(signal.SIGKILL)

    def show_stacks(self) -> bool:
        """Make a rank of a session append its stacks to its file (failure/stacks.py).

        A stopped process does so when it continues. False as in `kill`.
        """
        return self._send(STACKS_SIGNAL)

    def wake(self) -> bool:
        """Continue it if it is stopped. False as in `kill`."""
        return self._send(signal.SIGCONT)

    def _send(self, number: int) -> bool:
        """Send a signal; return whether it was sent.

        False if the process has ended, is on another node, or may not be signalled.
        """
        if not self.is_local() or self.has_ended():
            return False
        try:
            os.kill(self.pid, number)
        except OSError:
            return False
        return True


def parent_of(pid: int) -> int | None:
    """Return the pid of the parent of a process of this node; None if there is no such process."""
    fields = _stat_fields(pid)
    if fields:
        return int(fields[1])
    return None


def signal_name(number: int) -> str:
    """SIGKILL and so on; "signal 35" for real-time signals, most of which have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_status(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal_name(os.WTERMSIG(status))}"
    return f"exited with status {os.waitstatus_to_exitcode(status)}"


@cache
def node_identity() -> str:
    """Return a text that is equal for processes of one node that share its table of pids.

    Boot id, machine id (if there is one), pid namespace and host name, with "/" between them;
    cached. Nodes that were restored from one snapshot share the boot id and maybe the machine id.
    """
    texts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with contextlib.suppress(OSError):  # containers may have no machine id
            texts.append(Path(path).read_text(encoding="ascii").strip())
    return "/".join([*texts, os.readlink("/proc/self/ns/pid"), os.uname().nodename])


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below pid, breadth first; [] if there are none.

    pid itself is not included.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    below = list(children.get(pid, []))
    for child in below:  # the list grows meanwhile
        below.extend(children.get(child, []))
    return below


def leave(status: int) -> None:
    """Kill all descendants with SIGKILL and exit this process at once; never returns.

    Does not wait for threads and runs no exit handlers. stdout and stderr are flushed for up to 0.5
    s. Errors on the way, such as a /proc that cannot be read, do not prevent the exit.
    """
    try:
        flusher = threading.Thread(target=_flush, daemon=True)  # a full pipe must not block
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


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the third (state) on; None without such a process.

    OSError if the file cannot be read for another reason.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
