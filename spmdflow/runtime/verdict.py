"""What the io thread checks between messages, and how the controller ends a failed run.

`Watch` sees limits, deaths, silence and signals. `Verdict` gathers failures, names the first
cause, tells every rank and exits. Nothing here waits for the script or for a lane: a thread inside
a collective hears nothing, but a process that exits frees its peers at once. A run inside a host
program whose processes are all alive is unwound instead (runtime/io.py).
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from spmdflow.errors import RunFailed
from spmdflow.failure.cause import (
    GATHER_SECONDS,
    SHOW_SECONDS,
    SURVIVABLE_KINDS,
    UNWIND_SECONDS,
    Failure,
    call_within,
    failure_record,
    first_cause,
    print_report,
    run_failed,
    write_failure,
)
from spmdflow.failure.signals import STOP_SIGNALS
from spmdflow.failure.stacks import dump_stacks, line_in_stacks, stacks_path
from spmdflow.message import MAX_MESSAGE_BYTES
from spmdflow.runtime.call import Ledger, Pending
from spmdflow.runtime.peers import Peers
from spmdflow.runtime.rendezvous import SessionSettings
from spmdflow.runtime.stall import Stalls
from spmdflow.runtime.wire import Hub, Kind

logger = logging.getLogger(__name__)

LOST = "its connection is lost"
"""What is known of an end on another node, until a neighbour there tells more."""

_EXIT_SECONDS = 3.0
"""After ABORT, processes of this node that have not ended by then are killed."""
_SEND_SECONDS = 0.5
"""Time for ABORT to leave for other nodes before this process ends."""


class Verdict:
    """Failures of a run, and the end they lead to."""

    def __init__(
        self, hub: Hub, peers: Peers, ledger: Ledger, *, settings: SessionSettings
    ) -> None:
        self._hub = hub
        self.peers = peers
        self.ledger = ledger
        self.settings = settings
        self.failures: list[Failure] = []
        self.cause: Failure | None = None
        """Why the session ended, where the process goes on."""
        self.unwound = threading.Event()
        """Set once all ranks have been told to unwind."""
        self.unwinding = set(settings.ranks)
        """Ranks that have not left their lanes yet."""
        self._due = float("inf")
        self.stalls = Stalls(
            *(peers, ledger, settings), fail=self.add, show=self.show_stacks, now=time.monotonic()
        )

    def show_stacks(self, silent: list[int]) -> None:
        """Let every rank write its stacks; those of silent ranks are asked for by a signal."""
        for rank in self.settings.ranks:
            self._hub.send(rank, self._hub.seal(Kind.LOOK, silent))

    def add(self, failure: Failure) -> None:
        """Note a failure; the first one starts the clock."""
        if not self.failures:
            self._due = time.monotonic() + GATHER_SECONDS
        self.failures.append(failure)

    def add_death(self, rank: int, cause: str) -> None:
        """Note that rank is gone and what it was running; a second time only improves cause."""
        death = self._about("death", rank, cause)
        known = []
        for i, f in enumerate(self.failures):
            if (f.kind, f.rank) == ("death", rank):
                known.append(i)
        if not known:
            self.add(death)
        elif self.failures[known[0]].cause.startswith(LOST):
            self.failures[known[0]] = death

    def add_interrupt(self, rank: int) -> None:
        """Note that a user wants the end at once."""
        self.add(self._about("interrupt", rank, "Ctrl-C (SIGINT) came again: stopped at once"))

    def add_endless(self, rank: int) -> None:
        """Note that rank sent a message without end, on a connection that is closed now."""
        text = f"sent more than {MAX_MESSAGE_BYTES >> 20} MiB as parts of one message"
        if rank in self.peers.processes:
            self.add(self._about("exception", rank, f"MessageError: {text}"))
        else:
            logger.warning("somebody who has the key of this run %s; disconnected", text)

    def is_due(self, now: float) -> bool:
        """Whether there is something to do about failures: the time to gather them is over."""
        return now >= self._due or (self.cause is not None and not self.spares_processes)

    @property
    def spares_processes(self) -> bool:
        """Whether only the session ends: that is wanted, and no process is lost."""
        alive = all(failure.kind in SURVIVABLE_KINDS for failure in self.failures)
        return self.settings.unwinds and alive

    @property
    def is_of_script(self) -> bool:
        """Whether only the script failed. Then the calls that it has sent finish before the end.

        A rank that drops a call would leave the others of that call waiting for it.
        """
        return all(failure.kind == "script" for failure in self.failures)

    def unwind(self, pending: Iterable[Pending]) -> None:
        """End the session on every rank; pending are told, every process goes on."""
        self.cause, path = self._write_cause()
        details = path or "not written, as RUN_DIR is not this run's any more"
        logger.error("run failed: %s; details: %s", self.cause.sentence(), details)
        for rank in self.settings.ranks:
            self._hub.send(rank, self._hub.seal(Kind.UNWIND, self.cause))
        for waiting in pending:
            waiting.fail(RunFailed(self.cause.sentence()))
        self._due = time.monotonic() + UNWIND_SECONDS
        self.unwound.set()

    def check_unwinding(self, now: float) -> None:
        """Ranks that do not leave are lost after all."""
        for rank in sorted(self.unwinding) if now > self._due else ():
            cause = f"did not leave the failed run within {UNWIND_SECONDS:g} s"
            self.add(self._about("deadline", rank, cause))

    def execute(self, pending: Iterable[Pending]) -> None:
        """End the run on every rank; pending are told, then the caller ends this process."""
        self._add_stopped_ranks(time.monotonic())
        stopped = []
        for failure in self.failures:
            if failure.kind == "stopped":
                stopped.append(failure.rank)
        self.peers.kill(stopped)  # they write their stacks first
        cause, path = self._write_cause()
        print_report(cause, self.failures, path)
        abort = self._hub.seal(Kind.ABORT, stopped)
        for rank in self.settings.ranks[1:]:
            self._hub.send(rank, abort)
        own = stacks_path(self.settings.run_dir, self.settings.controller_rank)
        dump_stacks(own, f"the end: {cause.sentence()}", self.settings.owns_run_dir)
        for waiting in pending:
            waiting.fail(RunFailed(cause.sentence()))
        self._tell(cause)
        self._await_exits()
        call_within(SHOW_SECONDS, self.settings.show_failure)

    def _write_cause(self) -> tuple[Failure, Path | None]:
        """The first cause, and the file that tells it with all other failures.

        None instead of the file if RUN_DIR is not this run's any more: then nothing is written.
        """
        self.failures = [self._with_line(failure) for failure in self.failures]
        cause = first_cause(self.failures)
        if not self.settings.owns_run_dir():
            return cause, None
        path = self.settings.run_dir / "failure.json"
        write_failure(path, failure_record(cause, self.failures))
        return cause, path

    def _tell(self, cause: Failure) -> None:
        """Tell ranks outside the run, if their store still answers."""
        if (tell := self.settings.on_failure) is not None:
            call_within(_SEND_SECONDS, partial(tell, run_failed(cause)))

    def _add_stopped_ranks(self, now: float) -> None:
        """Add stopped ranks that owe an answer: they explain why others are late."""
        late = first_cause(self.failures).kind == "deadline"
        for rank in sorted(self.ledger.owing()):
            stopped = self._why_stopped(rank, now, silence_counts=late)
            if stopped and not self._is_known("stopped", rank):
                self.add(self._about("stopped", rank, f"does not answer: {stopped}"))

    def _why_stopped(self, rank: int, now: float, *, silence_counts: bool) -> str | None:
        silent = 3 * self.settings.beat_seconds if silence_counts else float("inf")
        return self.peers.why_stopped(rank, now, silent_seconds=silent)

    def _about(self, kind: str, rank: int, cause: str) -> Failure:
        """A failure of rank as seen from here, with what it was running."""
        running = self.ledger.running(rank)
        if not running:
            return Failure(kind, rank, f"{cause}, while idle {self.ledger.last(rank)}".rstrip())
        call, *more = running
        if more:
            also = f"; also running {more[0].label} in the {more[0].lane} lane"
        else:
            also = ""
        return Failure(kind, rank, cause + also, call.label, call.number, call.lane)

    def _with_line(self, failure: Failure) -> Failure:
        """The failure with the script's line of its call, and where its rank's Python was."""
        for call in self.ledger.running(failure.rank):
            if (call.number, call.lane) == (failure.number, failure.lane):
                where = failure.where
                if failure.kind in ("stopped", "deadline") and not where:
                    where = line_in_stacks(stacks_path(self.settings.run_dir, failure.rank))
                if failure.kind == "death":  # a process that is gone tells nothing more
                    where = self.stalls.last_line(failure.rank, call, time.monotonic())
                return replace(failure, line=call.line, where=where)
        return failure

    def _is_known(self, kind: str, rank: int) -> bool:
        return any(failure.kind == kind and failure.rank == rank for failure in self.failures)

    def _await_exits(self) -> None:
        """Wait for the processes to exit; SIGKILL those of this node that do not."""
        all_here = all(process.is_local() for process in self.peers.processes.values())
        start = time.monotonic()
        while time.monotonic() - start < _EXIT_SECONDS:
            sent = all_here or time.monotonic() - start > _SEND_SECONDS
            if sent and not self.peers.local_survivors():
                return
            time.sleep(0.02)
        self.peers.kill(self.peers.local_survivors())


_SIGTERM_SECONDS = 2.0
"""SIGTERM means the end of a failed run if a failure becomes known within this time."""
_AGAIN_SECONDS = 1.0
"""A rank may get one Ctrl-C twice: from the terminal or the batch system, and from torchrun."""
_PARTING_SECONDS = 1.0
"""A rank that leaves may be gone before its BYE is read."""
_PROBE_SECONDS = 3.0
_CLOSE_SECONDS = 30.0


class Watch:
    """The time limits of a session, except those of calls (`Stalls`).

    Every method is called with the io lock held.
    """

    def __init__(self, verdict: Verdict) -> None:
        self._peers = verdict.peers
        self._settings = verdict.settings
        self._verdict = verdict
        self.start_by = time.monotonic() + verdict.settings.start_seconds
        """When every rank must be connected."""
        self._close_by = self._stop_at = float("inf")
        self._term_seen = self._is_closing = False
        self._interrupted: dict[int, float] = {}
        """When each rank got its first Ctrl-C."""
        self._gone_since: dict[int, float] = {}
        self._probe_until = 0.0
        self.stop_requested = False
        """Whether the run was asked to save and end."""
        self.on_stop: Callable[[], str] = lambda: "saving and stopping"
        """Called when it is; says what will happen."""

    def closing(self, now: float) -> None:
        """CLOSE was sent: from here on ranks leave."""
        self._is_closing = True
        self._close_by = now + _CLOSE_SECONDS

    def signal_arrived(self, rank: int, number: int, now: float) -> None:
        """A rank received one of `STOP_SIGNALS`.

        SIGTERM: because another rank failed, or as a request to stop. The others are a request, and
        a second Ctrl-C ends the run at once. (torchrun, given a second Ctrl-C, sends SIGTERM.)
        """
        first = self._interrupted.get(rank)
        if first is not None and (
            number == signal.SIGTERM or (number == signal.SIGINT and now > first + _AGAIN_SECONDS)
        ):
            if not self._verdict.failures:
                self._verdict.add_interrupt(rank)
        elif number == signal.SIGTERM:
            self._term_arrived(rank, now)
        else:
            is_key = number == signal.SIGINT
            if is_key:
                self._interrupted.setdefault(rank, now)
            self._request_stop(STOP_SIGNALS[number], is_key=is_key)

    def _term_arrived(self, rank: int, now: float) -> None:
        if not self._term_seen and not self.stop_requested:
            self._term_seen = True
            self._stop_at = now + _SIGTERM_SECONDS
            logger.warning("rank %d received SIGTERM", rank)

    def _request_stop(self, by: str, *, is_key: bool = False) -> None:
        """Ask the script to save and end, once; is_key: a further Ctrl-C ends the run at once."""
        if self.stop_requested or self._verdict.failures:
            return
        self._stop_at = float("inf")
        self.stop_requested = True
        again = "; press Ctrl-C again to stop at once" if is_key else ""
        logger.warning("asked to end by %s: %s%s", by, self.on_stop(), again)

    def connection_lost(self, now: float) -> None:
        """Some connection ended: find out whose, for as long as libzmq may need to know."""
        self._probe_until = now + _PROBE_SECONDS

    def look(self, now: float, probe: Callable[[int], bool]) -> None:
        """Check everything once; probe(rank) sends something and says whether it could."""
        if now > self.start_by:
            self.start_by = float("inf")
            self._verdict.add(self._describe_missing())
        self._check_deaths(now, probe)
        if now > self._close_by:
            self._close_by = float("inf")
            cause = f"did not leave within {_CLOSE_SECONDS:g} s"
            for rank in self._peers.staying():
                self._verdict.add(Failure("deadline", rank, cause))
        self._peers.warn_about_silence(now)
        if now >= self._stop_at:
            self._request_stop("SIGTERM")

    def _describe_missing(self) -> Failure:
        missing = sorted(self._peers.missing)
        return Failure(
            "start",
            missing[0],
            f"ranks {missing} did not connect within {self._settings.start_seconds:g} s; "
            f"expected all of {len(self._settings.ranks)}; see their logs (SPMDFLOW_SECRET "
            f"must be the same everywhere), or raise run.start_seconds",
        )

    def _check_deaths(self, now: float, probe: Callable[[int], bool]) -> None:
        gone = self._peers.ended_ranks()
        if now < self._probe_until:
            gone = dict.fromkeys(self._peers.unreachable(probe), LOST) | gone
        for rank, how in gone.items():
            since = self._gone_since.setdefault(rank, now)
            if not self._is_closing or now - since > _PARTING_SECONDS:
                self._verdict.add_death(rank, how)
