"""The launcher above a rank: torchrun's agent, or a wrapper between it and the rank.

A rank whose torchrun was killed must not survive it: it would join the next start of the same
command on the same port. From the first lines of `main` the kernel ends the rank with its parent
(PR_SET_PDEATHSIG). Once the session exists, its comm thread watches the parent instead, because it
can also report what happened (`outlive_launcher`, then runtime/comm.py).

The kernel sends that signal when the *thread* that started the child ends. torchrun's agent starts
its ranks from the thread that then waits for them, so that thread ends with the agent. Other
parents do not guarantee this, so the signal is requested only if an agent started this process:

- not under srun without torchrun (slurmstepd ends the tasks of a step itself);
- not under mpirun (whose daemon may start ranks from a short-lived thread);
- not with --inproc (the parent is a shell, and nohup must work);
- not by `spmdflow.launch` in a host program (which decides itself how to end).

If there is a wrapper between torchrun and the rank, the wrapper counts as the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

from spmdflow.failure.process import Process, parent_of

AGENT_MARK = "TORCHELASTIC_RUN_ID"
"""An environment variable that torchrun's agent sets for its ranks but does not have itself."""
_PR_SET_PDEATHSIG = 1
_SHUTDOWN_SECONDS = 30.0
"""torchrun's default, and the names of its settings that change it (torch 2.13)."""
_SHUTDOWN_NAMES = (
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "PET_SHUTDOWN_TIMEOUT",
    "--shutdown-timeout",
    "--shutdown_timeout",
)


def die_with_launcher() -> int | None:
    """Let the kernel kill this process when its parent ends; return the parent's pid.

    None if the parent has already ended, so that another process has adopted this one: the parent
    changed meanwhile or cannot be a launcher. The main thread calls it as early as possible.
    """
    parent = os.getppid()
    _set_death_signal(signal.SIGKILL)
    if os.getppid() == parent and _can_be_launcher(parent):
        return parent
    return None


def launched_seconds(pid: int) -> float:
    """Seconds since the run of a rank was launched.

    This is the age of its torchrun, which restarts ranks, or of the rank itself if there is none.
    """
    return Process.of(_agent_of(pid)).age_seconds()


def shutdown_seconds(pid: int) -> float:
    """Return the seconds from a signal to a rank's torchrun until torchrun kills its ranks.

    The default is 30; torchrun's environment variables and its option --shutdown-timeout change it
    (the option wins). inf if torchrun did not start the rank.
    """
    agent = _agent_of(pid)
    if agent == pid:
        return float("inf")
    words: list[str] = []
    with contextlib.suppress(OSError):
        words += Path(f"/proc/{agent}/environ").read_bytes().decode(errors="replace").split("\0")
        words += Path(f"/proc/{agent}/cmdline").read_bytes().decode(errors="replace").split("\0")
    seconds = _SHUTDOWN_SECONDS
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--shutdown-timeout", "--shutdown_timeout") and not equals:
            value = words[index + 1] if index + 1 < len(words) else ""
        elif name not in _SHUTDOWN_NAMES:
            continue
        if value.isdecimal():
            seconds = float(value)
    return seconds


def _agent_of(pid: int) -> int:
    """Return the pid of the torchrun agent above a rank; pid itself if torchrun did not start it.

    Goes up to the first ancestor without TORCHELASTIC_RUN_ID in its environment, past any wrappers.
    It stops where an environment cannot be read.
    """
    parent = parent_of(pid)
    with contextlib.suppress(OSError):
        while parent and f"{AGENT_MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            pid = parent
            parent = parent_of(pid)
    return pid


def outlive_launcher() -> None:
    """Undo `die_with_launcher`, because the comm thread watches the parent now (main thread)."""
    _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    """Set the parent-death signal of the calling thread; new threads do not inherit it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def _can_be_launcher(pid: int) -> bool:
    """Return whether pid may be torchrun's agent (a Python program) or a wrapper that it started.

    A wrapper has TORCHELASTIC_RUN_ID in its environment. Others, such as `systemd --user`, are
    processes that adopt orphans. If it cannot be inspected: true unless it is process 1 or has
    ended.
    """
    process = Path(f"/proc/{pid}")
    try:
        program = os.readlink(process / "exe")
        if program == os.readlink("/proc/self/exe") or "python" in Path(program).name:
            return True
        return f"{AGENT_MARK}=".encode() in (process / "environ").read_bytes()
    except OSError:
        return pid != 1 and process.exists()
