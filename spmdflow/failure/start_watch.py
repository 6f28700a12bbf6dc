"""Reports a rank of this node that dies before the session exists, when nothing else watches it.

A thread runs from the first lines of `main` until the rendezvous. It waits for the other children
of torchrun's agent to end, and reads how they ended before the agent does. The agent then sends
SIGTERM to all ranks. This signal is blocked meanwhile, so that the thread can write
RUN_DIR/failure.json first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path

from spmdflow.checkpoint.lock import claim_run_dir, read_record
from spmdflow.errors import ConfigError
from spmdflow.failure.cause import Failure, failure_record, print_report, write_failure
from spmdflow.failure.process import Process, leave, parent_of

_LOOK_SECONDS = 0.2
_TERM_SECONDS = 1.0
"""SIGTERM may arrive a moment before this process sees the death that caused it."""
_SETTINGS_SECONDS = 20.0
_LEAVE_SECONDS = 3.0
_REPORTED_ENDS = ("exited with status 0", "exited with status 2")
"""A rank that refuses its settings has reported that itself."""


class StartWatch:
    """Watches the ranks of this node while they start."""

    def __init__(self, launcher: int) -> None:
        """Block SIGTERM and start the thread.

        launcher: pid of the agent. Called by the main thread before any other thread runs.
        """
        self.run_dir: Path | None = None
        """Set once it is known."""
        self.launcher = launcher
        self._start = time.time()
        self._over = threading.Event()
        self._ranks: dict[int, tuple[int, Process]] = {}
        self._poll = select.poll()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._run, name="start", daemon=True).start()

    def end(self) -> None:
        """Stop watching, because the session now does (main thread)."""
        self._over.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _run(self) -> None:
        """Watch the other ranks of this node until `end`; if one dies, report it and exit.

        A rank that exited with status 0 or 2 has reported its own end. After SIGTERM, which is
        blocked, this process ends with status 143 if no death is seen within 1 s. If `end` is
        called before that, the signal is sent again, for the session to handle.
        """
        terminated = float("inf")
        while True:
            self._add_ranks()
            ended = self._poll.poll(1000 * _LOOK_SECONDS)
            if self._over.is_set():
                break
            for descriptor, _ in ended:
                rank, process = self._ranks.pop(descriptor)
                how = process.end_cause_or_none()
                if how is None:  # the agent has read it; another rank may have read it before
                    how = "ended (signal or status unknown)"
                    time.sleep(_LOOK_SECONDS)
                self._poll.unregister(descriptor)
                os.close(descriptor)
                if how not in _REPORTED_ENDS:
                    self._report(rank, f"process {process.pid} {how}, before all ranks had met")
            if signal.sigtimedwait({signal.SIGTERM}, 0) is not None:
                terminated = time.monotonic()
            if time.monotonic() > terminated + _TERM_SECONDS:
                leave(128 + signal.SIGTERM)
        if terminated < float("inf"):  # no rank died: the signal asks the session to stop
            os.kill(os.getpid(), signal.SIGTERM)
        for descriptor in self._ranks:
            os.close(descriptor)

    def _add_ranks(self) -> None:
        """Begin to watch children of torchrun's agent that have RANK in their environment.

        Skips this process and those that are watched already. Children that have ended or cannot be
        read are ignored.
        """
        known = {process.pid for _, process in self._ranks.values()} | {os.getpid()}
        for entry in Path(f"/proc/{self.launcher}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for pid in map(int, entry.read_text().split()):
                    if pid in known:
                        continue
                    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    rank = next((word[5:] for word in words if word.startswith(b"RANK=")), None)
                    if rank is not None:
                        descriptor = os.pidfd_open(pid)
                        self._ranks[descriptor] = int(rank), Process.of(pid)
                        self._poll.register(descriptor, select.POLLIN)

    def _may_write(self, at_end: contextlib.ExitStack) -> bool:
        """Return whether this process can lock RUN_DIR, or rank 0 of this launch has locked it.

        Then it may write there. If it can lock RUN_DIR, at_end releases the lock. The holder is of
        this launch if its process runs on this node and has the same parent, torchrun's agent.
        """
        assert self.run_dir is not None
        try:
            at_end.callback(claim_run_dir(self.run_dir).release)
        except ConfigError:  # in use: by rank 0 of this start, or by another run
            record = read_record(self.run_dir)
            if record is None or not record.is_of_this_node():
                return False
            return parent_of(record.pid) == self.launcher
        return True

    def _claim(self, path: Path) -> None:
        """Create an empty file at path, which this process will write.

        FileExistsError if another rank of this launch has created it. A file left by an earlier
        launch, modified before this watch began, is removed first.
        """
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < self._start:
                path.unlink()
        path.touch(exist_ok=False)

    def _report(self, rank: int, cause: str) -> None:
        """Write a rank's death to RUN_DIR/failure.json, print it, and exit with status 1.

        If another rank of this launch has written that file, it only ends the process. If RUN_DIR
        belongs to another run, it only prints. Waits up to 20 s until run_dir is known, and gives
        up if it stays unknown; waits 3 s before the exit. Never returns.
        """
        until = time.monotonic() + _SETTINGS_SECONDS
        while self.run_dir is None:
            time.sleep(0.05)
            if time.monotonic() > until:
                leave(1)
        failure = Failure("death", rank, cause)
        with contextlib.suppress(FileExistsError), contextlib.ExitStack() as at_end:
            path = self.run_dir / "failure.json"
            if self._may_write(at_end):
                self._claim(path)
                write_failure(path, failure_record(failure, []))
                print_report(failure, [], path)
            else:
                print_report(failure, [], None)
        time.sleep(_LEAVE_SECONDS)
        leave(1)
