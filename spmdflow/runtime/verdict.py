"""How the controller ends a failed run: gather, name the first cause, tell everybody, leave.

Runs in the io thread. Nothing here waits for the script or for a lane: a thread inside a
collective hears nothing, but a process that exits frees its peers at once. A run inside a host
program whose processes are all alive is unwound instead (runtime/io.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from spmdflow.errors import RunFailed
from spmdflow.runtime.failure import (
    GATHER_SECONDS,
    UNWIND_SECONDS,
    Failure,
    as_record,
    first_cause,
    leaves_all_alive,
    report,
    run_failed,
    write_failure,
)
from spmdflow.runtime.ledger import Entry, Ledger
from spmdflow.runtime.order import Pending
from spmdflow.runtime.peers import Peers
from spmdflow.runtime.process import dump_stacks
from spmdflow.runtime.settings import SessionSettings
from spmdflow.runtime.wire import Envelopes, Hub, Kind

logger = logging.getLogger(__name__)

LOST = "its connection is lost"
"""What is known of an end on another machine, until a neighbour there tells more."""

_EXIT_SECONDS = 3.0
"""After ABORT, processes of this machine that have not ended by then are killed."""
_SEND_SECONDS = 0.5
"""Time for ABORT to leave for other machines before this process ends."""


class Verdict:
    """Failures of a run, and the end they lead to."""

    def __init__(self, peers: Peers, ledger: Ledger, *, settings: SessionSettings) -> None:
        self._peers, self._ledger, self._settings = peers, ledger, settings
        self.failures: list[Failure] = []
        self.cause: Failure | None = None
        """Why the session ended, where the process goes on."""
        self.unwound = threading.Event()
        """That has been told to all ranks."""
        self.unwinding = set(settings.ranks)
        """Ranks that have not left their lanes yet."""
        self._due = float("inf")

    def add(self, failure: Failure) -> None:
        """Note a failure; the first one starts the clock."""
        if not self.failures:
            self._due = time.monotonic() + GATHER_SECONDS
        self.failures.append(failure)

    def add_death(self, rank: int, cause: str) -> None:
        """Note that rank is gone and what it was running; a second time only improves cause."""
        death = self._about("death", rank, cause)
        known = [i for i, f in enumerate(self.failures) if (f.kind, f.rank) == ("death", rank)]
        if not known:
            self.add(death)
        elif self.failures[known[0]].cause.startswith(LOST):
            self.failures[known[0]] = death

    def add_overdue(self, rank: int, entry: Entry, now: float) -> None:
        """Note, once, that rank does not answer, as stopped or merely late."""
        if self._is_known("deadline", rank) or self._is_known("stopped", rank):
            return
        late = f"did not answer {entry.label} within its limit of {entry.seconds:g} s"
        stopped = self._stopped(rank, now, silence_counts=True)
        if stopped:
            self.add(self._about("stopped", rank, f"{late}: {stopped}"))
        else:
            self.add(self._about("deadline", rank, late))

    def is_due(self, now: float) -> bool:
        """Whether there is something to do about failures: the time to gather them is over."""
        return now >= self._due or (self.cause is not None and not self.spares_processes)

    @property
    def spares_processes(self) -> bool:
        """Whether only the session ends: that is wanted, and no process is lost."""
        return self._settings.unwinds and leaves_all_alive(self.failures)

    @property
    def is_of_script(self) -> bool:
        """Whether only the script failed. Then what it has sent is let through before the end.

        A rank that drops a call would leave the others of that call waiting for it.
        """
        return all(failure.kind == "script" for failure in self.failures)

    def unwind(self, hub: Hub, envelopes: Envelopes, *, pending: Iterable[Pending]) -> None:
        """End the session on every rank; pending are told, every process goes on."""
        self.failures = [self._with_line(failure) for failure in self.failures]
        self.cause = cause = first_cause(self.failures)
        path = self._settings.run_dir / "failure.json"
        write_failure(path, as_record(cause, self.failures))
        logger.error("run failed: %s; details: %s", cause.sentence(), path)
        for rank in self._settings.ranks:
            hub.send(rank, envelopes.seal(Kind.UNWIND, cause))
        for waiting in pending:
            waiting.fail(RunFailed(cause.sentence()))
        self._due = time.monotonic() + UNWIND_SECONDS
        self.unwound.set()

    def check_unwinding(self, now: float) -> None:
        """Ranks that do not leave are lost after all."""
        for rank in sorted(self.unwinding) if now > self._due else ():
            cause = f"did not leave the failed run within {UNWIND_SECONDS:g} s"
            self.add(self._about("deadline", rank, cause))

    def execute(self, hub: Hub, envelopes: Envelopes, *, pending: Iterable[Pending]) -> None:
        """End the run on every rank; pending are told, then the caller ends this process."""
        self._add_stopped_ranks(time.monotonic())
        self.failures = [self._with_line(failure) for failure in self.failures]
        cause = first_cause(self.failures)
        path = self._settings.run_dir / "failure.json"
        write_failure(path, as_record(cause, self.failures))
        report(cause, self.failures, path)
        stopped = [failure.rank for failure in self.failures if failure.kind == "stopped"]
        abort = envelopes.seal(Kind.ABORT, stopped)
        for rank in self._settings.ranks:
            if rank != self._settings.controller_rank:
                hub.send(rank, abort)
        for rank in stopped:
            self._peers.kill(rank)
        dump_stacks(self._settings.run_dir / f"stacks-rank{self._settings.controller_rank}.txt")
        for waiting in pending:
            waiting.fail(RunFailed(cause.sentence()))
        self._tell(cause)
        self._await_exits()

    def _tell(self, cause: Failure) -> None:
        """Tell ranks outside the run, if their store still answers."""
        if self._settings.on_failure is not None:
            told = (run_failed(cause),)
            telling = threading.Thread(target=self._settings.on_failure, args=told, daemon=True)
            telling.start()
            telling.join(_SEND_SECONDS)

    def _add_stopped_ranks(self, now: float) -> None:
        """Whoever owes an answer and is stopped explains why others are late."""
        late = first_cause(self.failures).kind == "deadline"
        for rank in sorted(self._ledger.owing()):
            stopped = self._stopped(rank, now, silence_counts=late)
            if stopped and not self._is_known("stopped", rank):
                self.add(self._about("stopped", rank, f"does not answer: {stopped}"))

    def _stopped(self, rank: int, now: float, *, silence_counts: bool) -> str | None:
        silent = 3 * self._settings.beat_seconds if silence_counts else float("inf")
        return self._peers.stopped(rank, now, silent_seconds=silent)

    def _about(self, kind: str, rank: int, cause: str) -> Failure:
        """A failure of rank as seen from here, with what it was running."""
        running = self._ledger.running(rank)
        if not running:
            return Failure(kind, rank, f"{cause}, while idle")
        entry, *more = running
        also = f"; also running {more[0].label} in the {more[0].lane} lane" if more else ""
        return Failure(kind, rank, cause + also, entry.label, entry.number, entry.lane)

    def _with_line(self, failure: Failure) -> Failure:
        """With the script's line that gave what the rank was running."""
        running = self._ledger.running(failure.rank)
        lines = [e.line for e in running if (e.number, e.lane) == (failure.number, failure.lane)]
        return replace(failure, line=lines[0]) if lines else failure

    def _is_known(self, kind: str, rank: int) -> bool:
        return any(failure.kind == kind and failure.rank == rank for failure in self.failures)

    def _await_exits(self) -> None:
        """Give everybody time to go; SIGKILL those of this machine who do not."""
        start = time.monotonic()
        while time.monotonic() - start < _EXIT_SECONDS:
            sent = not self._peers.has_remote() or time.monotonic() - start > _SEND_SECONDS
            if sent and not self._peers.local_survivors():
                return
            time.sleep(0.02)
        for rank in self._peers.local_survivors():
            self._peers.kill(rank)
