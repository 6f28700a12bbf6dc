"""The parent of a worker process: ends everything that one started, however it ended.

    process with the pool -> keeper -> worker process -> whatever the user's code starts

The keeper is a subreaper: a process below it whose parent ends becomes its child, also one with a
session of its own (`setsid`, `start_new_session=True`). When the worker process ends, or the
process with the pool (which closes a pipe), the keeper kills its children until there are none.
It runs no code of users, and it ends as the worker process did. Imports next to nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import select
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_MILLISECONDS = 1000
"""Between two looks for adopted processes that have ended."""
_LOOK_MILLISECONDS = 20
"""Between two looks for the worker's end, where nothing tells it."""
_KILL_SECONDS = 4.0
"""Until processes that cannot be killed (another user's, stuck in the kernel) are given up."""


def main(child: str, socket_fd: int, lifeline_fd: int, stack_fd: int) -> None:
    """Start the worker process, whose module is `child`, and keep it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A batch system may signal every process of a job; the worker process unblocks what it needs.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keeper_pid = os.getpid()
    worker_pid = os.fork()
    if worker_pid > 0:
        os.close(socket_fd)
        os.close(stack_fd)
        _keep(worker_pid, lifeline_fd)
    os.close(lifeline_fd)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper_pid:  # it has ended already
        os._exit(1)
    importlib.import_module(child).main(socket_fd, stack_fd)


def _keep(worker_pid: int, lifeline_fd: int) -> None:
    """Wait for the end of the worker process or of the pool's; then end everything."""
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)  # nothing is ever written: it ends
    milliseconds = _REAP_MILLISECONDS
    try:
        poll.register(os.pidfd_open(worker_pid), select.POLLIN)
    except OSError:  # a sandbox without pidfds
        milliseconds = _LOOK_MILLISECONDS
    status: int | None = None
    is_wanted = True
    while status is None and is_wanted:
        ready = poll.poll(milliseconds)
        status = _reap().get(worker_pid)
        is_wanted = all(descriptor != lifeline_fd for descriptor, _ in ready)
    _kill_children()
    _end_as(0 if status is None else status)


def _reap() -> dict[int, int]:
    """Wait statuses of the children that have ended, by pid."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found[pid] = status
    return found


def _kill_children() -> None:
    """Kill all children, and those that become children thereby, until there are none."""
    limit = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < limit:
        children = _children()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
        _reap()


def _children() -> list[int]:
    """Pids of this process's children, also of those that have ended."""
    own = str(os.getpid())
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                parent = text.rpartition(")")[2].split()[1]
                if parent == own:
                    found.append(int(entry.name))
    return found


def _end_as(status: int) -> None:
    """End this process with a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        # no other one: what a batch system has sent to this process may be pending
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    """prctl(2) of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def kill_marked(mark: str) -> None:
    """Kill the processes of this user that have `mark` in their environment.

    For what a keeper left that was itself killed.
    """
    limit = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < limit:
        found = []
        for pid in _other_pids():
            if mark.encode() in _environment_of(pid):
                found.append(pid)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _other_pids() -> list[int]:
    """Pids of all other processes."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pids.append(int(entry.name))
    result = []
    for pid in pids:
        if pid != os.getpid():
            result.append(pid)
    return result


def _environment_of(pid: int) -> bytes:
    """What a process was started with; empty if it has ended, or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
