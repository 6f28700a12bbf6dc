"""The launcher of a rank, torchrun's agent, as the rank sees it: whether it is still there.

A rank whose torchrun was killed must not live on: it would join the next start of the same command
on the same port. From the first lines of `main` the kernel ends the rank with its parent
(PR_SET_PDEATHSIG); once the session stands its comm thread watches the parent instead, because it
can also say what happened (`outlive_launcher`, then runtime/comm.py).

The kernel sends that signal when the *thread* that started the child ends. torchrun's agent starts
its ranks from the thread that then waits for them, so that thread ends with the agent. Other
parents promise nothing of the kind, so the signal is asked for only where an agent started us:
not under srun without torchrun (slurmstepd ends the tasks of a step itself), not under mpirun
(whose daemon may start ranks from a passing thread), not with --inproc (the parent is a shell, and
nohup must work), not by `spmdflow.launch` in a host program (how that one ends is its own affair).
With a wrapper between torchrun and the rank the wrapper counts as the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

AGENT_MARK = "TORCHELASTIC_RUN_ID"
"""An environment variable that every rank of an agent has and the agent itself has not."""

_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> int | None:
    """From now on this process ends when its parent does; the parent's pid.

    Called by the main thread as early as possible. None: the parent has ended already, and who
    looks like one is the process that adopts orphans.
    """
    parent = os.getppid()
    _set_death_signal(signal.SIGKILL)
    return parent if os.getppid() == parent and _can_be_launcher(parent) else None


def outlive_launcher() -> None:
    """Undo `die_with_launcher` (main thread): somebody else watches the parent now."""
    _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    """Of the calling thread; a new thread has none."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def _can_be_launcher(pid: int) -> bool:
    """Whether pid is an agent (a Python program) or a wrapper that an agent started.

    Orphans are adopted by process 1 or by the nearest "subreaper", such as `systemd --user`; these
    are neither. An agent may be process 1 itself (in a container). Process 1 of somebody else
    cannot be looked at, and is none.
    """
    process = Path(f"/proc/{pid}")
    try:
        program = os.readlink(process / "exe")
        if program == os.readlink("/proc/self/exe") or "python" in Path(program).name:
            return True
        return f"{AGENT_MARK}=".encode() in (process / "environ").read_bytes()
    except OSError:
        return pid != 1 and process.exists()
