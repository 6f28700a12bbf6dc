"""The parent of a worker process: kills everything that the worker started, however it ended.

    process with the pool -> keeper -> worker process -> processes of the user's code

The keeper is a subreaper: a descendant whose parent ends becomes its child, even in another session
(`setsid`, `start_new_session=True`). When the worker process ends, or the process with the pool
(which closes a pipe), the keeper kills its children until there are none. It runs no code of users,
exits with the worker's status, and imports next to nothing.
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

# Not multiprocessing: its spawn imports the main module again, and torch with it.
BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module('spmdflow.rewards.keeper').main(sys.argv[2], *map(int, sys.argv[3:]))"
)
"""Program of a keeper for `python -c`: sys.path as JSON, then the arguments of `main`."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_MILLISECONDS = 1000
"""Interval of checks for adopted processes that have ended."""
_LOOK_MILLISECONDS = 20
"""Interval of checks for the worker's end where pidfds are not available."""
_KILL_SECONDS = 4.0
"""Time limit for processes that cannot be killed (another user's, or stuck in the kernel)."""


def main(child: str, socket_fd: int, lifeline_fd: int, stack_fd: int) -> None:
    """Become a keeper; its worker process runs `main` of the module `child`."""
    become_keeper(lifeline_fd, (socket_fd, stack_fd))
    importlib.import_module(child).main(socket_fd, stack_fd)


def become_keeper(lifeline_fd: int, worker_fds: tuple[int, ...]) -> None:
    """Become a subreaper, fork the worker process, and clean up after it.

    The parent waits as the keeper (`_wait_and_kill`), and never returns. The forked child starts a
    session of its own, is killed if the keeper dies, and returns with all signals blocked.
    worker_fds: descriptors that the keeper closes.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A batch system may signal every process of a job; the worker process unblocks what it needs.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keeper_pid = os.getpid()
    worker_pid = os.fork()
    if worker_pid > 0:
        for descriptor in worker_fds:
            os.close(descriptor)
        _wait_and_kill(worker_pid, lifeline_fd)
    os.close(lifeline_fd)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper_pid:  # it has ended already
        os._exit(1)


def _wait_and_kill(worker_pid: int, lifeline_fd: int) -> None:
    """Wait until the worker process or the pool's process ends, kill all children, and exit.

    The end of the pool's process is seen at its pipe, lifeline_fd. Exits as the worker ended, or
    with status 0 if it was still running. Reaps adopted processes at least every second.
    """
    poll = select.poll()
    poll.register(
        lifeline_fd, select.POLLIN
    )  # nothing is ever written; it becomes ready at its end
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
    if status is None:
        _kill_worker(worker_pid)
    _kill_children()
    _exit_with_status(0 if status is None else status)


def _kill_worker(pid: int) -> None:
    """Kill a child with SIGKILL and reap it, if it ends within 20 ms.

    What it leaves are then children of this process; usually there are none, and no need to look at
    all processes of the node.
    """
    os.kill(pid, signal.SIGKILL)
    limit = time.monotonic() + _LOOK_MILLISECONDS / 1000
    while time.monotonic() < limit and pid not in _reap():
        time.sleep(0.0005)


def _reap() -> dict[int, int]:
    """Reap all children that have ended, without blocking; return pid -> wait status."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            statuses[pid] = status
    return statuses


def _kill_children() -> None:
    """Kill all children with SIGKILL, again and again until there are none, for at most 4 s.

    Grandchildren become children when their parent ends, and are killed too.
    """
    limit = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < limit and _has_children():
        children = _child_pids()
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
        _reap()


def _has_children() -> bool:
    """Whether this process has children, also ones that have ended and were not reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _child_pids() -> list[int]:
    """Return the pids of this process's children, found in /proc.

    Children that have ended but were not reaped are included.
    """
    own = str(os.getpid())
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                parent = text.rpartition(")")[2].split()[1]
                if parent == own:
                    pids.append(int(entry.name))
    return pids


def _exit_with_status(status: int) -> None:
    """End this process as a wait status says: with that exit code, or by that signal.

    A signal leaves no core file. If it does not end this process, the exit code is 128 + its
    number.
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        # unblock no other signal: a batch system's may be pending
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    """prctl(2) of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def kill_marked(mark: str) -> None:
    """Kill this user's processes whose environment contains `mark`, repeatedly for at most 4 s.

    It cleans up after a keeper that was itself killed. Returns as soon as there are none.
    """
    limit = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < limit:
        pids = []
        for pid in _other_pids():
            if mark.encode() in _environment_of(pid):
                pids.append(pid)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _other_pids() -> list[int]:
    """Return the pids of all processes in /proc but this one."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            pids.append(int(entry.name))
    return pids


def _environment_of(pid: int) -> bytes:
    """The environment that a process started with; empty if it has ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
