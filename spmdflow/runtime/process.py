"""Processes as Linux shows them: identity, life, end, signals, and the launcher above a rank.

A pid alone can be reused, so a process is a pid with its start time; a `pidfd` becomes readable
the moment the process ends, whoever its parent is. Knows no messages.

A rank whose torchrun was killed must not live on: it would join the next start of the same command
on the same port. From the first lines of `main` the kernel ends the rank with its parent
(PR_SET_PDEATHSIG); once the session stands its comm thread watches the parent instead, because it
can also say what happened (`outlive_launcher`, then runtime/comm.py).

The kernel sends that signal when the *thread* that started the child ends. torchrun's agent starts
its ranks from the thread that then waits for them, so that thread ends with the agent. Other
parents promise nothing of the kind, so the signal is asked for only where an agent started us:
not under srun without torchrun (slurmstepd ends the tasks of a step itself), not under mpirun
(whose daemon may start ranks from a short-lived thread), not with --inproc (the parent is a shell,
and nohup must work), not by `spmdflow.launch` in a host program (which decides itself how to end).
With a wrapper between torchrun and the rank the wrapper counts as the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.5
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Asks a rank of a session for its stacks; no library is known to use it."""
STATES = {"R": "running", "S": "sleeping", "D": "uninterruptible: it waits for a disk or a device"}
STATES |= {"T": "stopped", "t": "stopped by a debugger"}
"""What the letters of `Process.state` mean."""
_UNKNOWN = "?"
_LOWEST_PRIORITY = 19
# of malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Process:
    """One process of one node."""

    pid: int
    start_ticks: int
    """Start in clock ticks since boot: tells a reused pid from the process that was meant."""
    node: str
    """Equal where pids mean the same processes (`node_identity`)."""

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now."""
        fields = _stat_fields(pid)
        return cls(pid, int(fields[19]) if fields else 0, node_identity())

    def age_seconds(self) -> float:
        """Seconds since it began; it runs on this node."""
        began = self.start_ticks / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began

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
        if fields and is_same:
            return fields[0]
        return None

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.state() in ("T", "t")

    def describe(self) -> str:
        """The process and its state in words."""
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
        """How it ended, such as "killed by SIGKILL"; only known until its parent asks.

        Waits up to seconds for an end that has begun (its connections close a moment earlier).
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
        """A descriptor that is readable once the process ended; close it. None if ended."""
        if self.has_ended() or not self.is_local():
            return None
        try:
            return os.pidfd_open(self.pid)
        except OSError:
            return None

    def kill(self) -> bool:
        """SIGKILL; False if it had ended or lives on another node."""
        return self._send(signal.SIGKILL)

    def show_stacks(self) -> bool:
        """Let a rank of a session append its stacks to its file (runtime/stacks.py).

        A stopped one does it once it goes on. False as of `kill`.
        """
        return self._send(STACKS_SIGNAL)

    def wake(self) -> bool:
        """Let it go on if it is stopped. False as of `kill`."""
        return self._send(signal.SIGCONT)

    def _send(self, number: int) -> bool:
        if not self.is_local() or self.has_ended():
            return False
        try:
            os.kill(self.pid, number)
        except OSError:
            return False
        return True


def parent_of(pid: int) -> int | None:
    """Pid of the parent of a process of this node; None if there is no such process."""
    fields = _stat_fields(pid)
    if fields:
        return int(fields[1])
    return None


def signal_name(number: int) -> str:
    """SIGKILL, ...; of real-time signals Python names the first and the last alone."""
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
    """Names the boot, pid namespace, machine id and host name of this process.

    Nodes restored from one snapshot share the first two, and may share the third.
    """
    texts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with contextlib.suppress(OSError):  # containers may have no machine id
            texts.append(Path(path).read_text(encoding="ascii").strip())
    return "/".join([*texts, os.readlink("/proc/self/ns/pid"), os.uname().nodename])


def host_bytes() -> int:
    """Host memory of this process alone: without mapped files and memory shared with others."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * resource.getpagesize()


def open_closed_streams() -> None:
    """Open /dev/null as each standard stream that this process was started without.

    Otherwise Python has no `sys.stdout`, the next file or socket gets the number of the closed
    descriptor, and processes that this one starts have no such stream either.
    """
    missing = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            missing.append((number, name))
    for number, _ in missing:
        if not _is_open(number):
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number, so mostly this one
            os.dup2(null, number)
            os.set_inheritable(number, True)
            if null != number:
                os.close(null)
    for number, name in missing:
        setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def allow_open_files() -> None:
    """Raise the limit of open descriptors as far as this process may.

    A controller needs several for each rank, and 1,024 are the usual limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory, where it would return it to the system.

    Every forward frees its activations; fetching their pages anew takes a fifth of the time of a
    small model's on a CPU. Elsewhere than under glibc nothing changes.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            adjust(setting, 1 << 30)


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


def give_way() -> None:
    """Let this thread, and those that it starts, have a processor when no other one needs it."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


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


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third (state) on; None if there is no such process.

    OSError if it cannot be read for another reason.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


STOP_SIGNALS: dict[int, str] = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C (SIGINT)",
    signal.SIGHUP: "SIGHUP (the terminal was closed)",
}
"""Signals that ask a run to save and stop, in words."""


class Signals:
    """`STOP_SIGNALS` during a session: held back from every thread, read by the comm thread.

    They are blocked, so threads started later inherit that and `sigtimedwait` takes them. Threads
    that libraries started before (gloo's) do not block them; for those a handler is set, whose
    wakeup descriptor is written by the interpreter's C code in whichever thread is hit, even while
    the main thread sits in a collective. A signal that was ignored before stays so: nohup ignores
    SIGHUP, and a shell's background job SIGINT.
    A context manager for the main thread; `take` belongs to the comm thread.
    """

    def __enter__(self) -> Signals:
        self.descriptor, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._taken = {each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        self._old_handlers: dict[int, Any] = {}
        for number in self._taken:
            self._old_handlers[number] = signal.signal(number, _ignore)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def take(self) -> set[int]:
        """Which of them arrived since the last call."""
        arrived: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            arrived.update(os.read(self.descriptor, 4096))
        while (pending := signal.sigtimedwait(self._taken, 0)) is not None:
            arrived.add(pending.si_signo)
        return arrived & self._taken

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        os.close(self._writer)
        os.close(self.descriptor)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Keeps the default action (sudden death) away; `take` reports the signal."""


AGENT_MARK = "TORCHELASTIC_RUN_ID"
"""An environment variable that torchrun's agent sets for its ranks but does not have itself."""

_PR_SET_PDEATHSIG = 1
_SHUTDOWN_SECONDS = 30.0
"""torchrun's own, unless it is told otherwise in one of these ways (torch 2.13)."""
_SHUTDOWN_NAMES = (
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "PET_SHUTDOWN_TIMEOUT",
    "--shutdown-timeout",
    "--shutdown_timeout",
)


def die_with_launcher() -> int | None:
    """From now on this process ends when its parent does; the parent's pid.

    Called by the main thread as early as possible. None: the parent has ended already, and this
    process was adopted by another one.
    """
    parent = os.getppid()
    _set_death_signal(signal.SIGKILL)
    if os.getppid() == parent and _can_be_launcher(parent):
        return parent
    return None


def launched_seconds(pid: int) -> float:
    """Seconds since a rank's run was launched: the age of its torchrun, which restarts ranks, or of
    the rank itself where there is none."""
    return Process.of(_agent_of(pid)).age_seconds()


def shutdown_seconds(pid: int) -> float:
    """Seconds from a signal to a rank's torchrun until it kills its ranks; infinite without one."""
    agent = _agent_of(pid)
    if agent == pid:
        return float("inf")
    given: list[str] = []
    with contextlib.suppress(OSError):
        given += Path(f"/proc/{agent}/environ").read_bytes().decode(errors="replace").split("\0")
        given += Path(f"/proc/{agent}/cmdline").read_bytes().decode(errors="replace").split("\0")
    seconds = _SHUTDOWN_SECONDS
    for place, word in enumerate(given):
        name, equals, value = word.partition("=")
        if name in ("--shutdown-timeout", "--shutdown_timeout") and not equals:
            value = given[place + 1] if place + 1 < len(given) else ""
        elif name not in _SHUTDOWN_NAMES:
            continue
        if value.isdecimal():
            seconds = float(value)
    return seconds


def _agent_of(pid: int) -> int:
    """The process of torchrun above a rank; the rank itself if it was not started by one."""
    fields = _stat_fields(pid)
    with contextlib.suppress(OSError):
        while fields and f"{AGENT_MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(fields[1])
            fields = _stat_fields(pid)
    return pid


def outlive_launcher() -> None:
    """Undo `die_with_launcher` (main thread): somebody else watches the parent now."""
    _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    """Set the parent-death signal of the calling thread; new threads do not inherit it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def _can_be_launcher(pid: int) -> bool:
    """Whether pid is an agent (a Python program) or a wrapper that an agent started.

    Orphans are adopted by process 1 or by the nearest "subreaper", such as `systemd --user`; these
    are neither. An agent may be process 1 itself (in a container). Process 1 of another user
    cannot be inspected and does not count.
    """
    process = Path(f"/proc/{pid}")
    try:
        program = os.readlink(process / "exe")
        if program == os.readlink("/proc/self/exe") or "python" in Path(program).name:
            return True
        return f"{AGENT_MARK}=".encode() in (process / "environ").read_bytes()
    except OSError:
        return pid != 1 and process.exists()
