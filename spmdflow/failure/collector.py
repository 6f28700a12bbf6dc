"""Collects the failures of a session on the controller, and determines their cause.

It ends nothing: runtime/teardown.py ends the session.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spmdflow.failure.cause import (
    GATHER_SECONDS,
    SURVIVABLE_KINDS,
    Failure,
    failure_record,
    first_cause,
    write_failure,
)
from spmdflow.failure.duration import SILENT_BEATS
from spmdflow.failure.open_call import OpenCalls
from spmdflow.failure.peers import Peers
from spmdflow.failure.settings import SessionSettings
from spmdflow.failure.stacks import line_in_stacks, stacks_path
from spmdflow.failure.stall import StallWatch
from spmdflow.message import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

CONNECTION_LOST = "its connection is lost"
"""The cause of a death on another node, until a rank there reports how the process ended."""


class FailureCollector:
    """The failures of a session, in order of arrival.

    Every method is called with the io lock held.
    """

    def __init__(
        self,
        peers: Peers,
        calls: OpenCalls,
        settings: SessionSettings,
        *,
        show_stacks: Callable[[list[int]], None],
    ) -> None:
        """show_stacks: makes all ranks write their stacks; those listed do so on a signal."""
        self.peers = peers
        self.settings = settings
        self.failures: list[Failure] = []
        self.stalls = StallWatch(
            peers, calls, settings, fail=self.add, show_stacks=show_stacks, now=time.monotonic()
        )
        self._calls = calls
        self._complete_at = float("inf")

    def add(self, failure: Failure) -> None:
        """Add a failure. The first one starts the clock of `is_complete`."""
        if not self.failures:
            self._complete_at = time.monotonic() + GATHER_SECONDS
        self.failures.append(failure)

    def add_of_rank(self, kind: str, rank: int, cause: str) -> None:
        """Add a failure of rank, with the calls that it was running."""
        self.add(self._with_calls(kind, rank, cause))

    def add_death(self, rank: int, cause: str) -> None:
        """Add the death of rank, with the calls that it was running, unless it is known.

        A known death keeps its cause, unless that only says that the connection was lost: then the
        new cause replaces it.
        """
        death = self._with_calls("death", rank, cause)
        for index, failure in enumerate(self.failures):
            if (failure.kind, failure.rank) == ("death", rank):
                if failure.cause.startswith(CONNECTION_LOST):
                    self.failures[index] = death
                return
        self.add(death)

    def add_interrupt(self, rank: int) -> None:
        """Add that rank received a second Ctrl-C, which ends the run at once."""
        self.add_of_rank("interrupt", rank, "Ctrl-C (SIGINT) came again: stopped at once")

    def add_endless_message(self, rank: int) -> None:
        """Add the failure of a rank that sent a message without end.

        Its connection is closed already. The kind of the failure is "exception". If rank is not one
        of this run (-1), a warning is logged instead.
        """
        text = f"sent more than {MAX_MESSAGE_BYTES >> 20} MiB as parts of one message"
        if rank in self.peers.processes:
            self.add_of_rank("exception", rank, f"MessageError: {text}")
        else:
            logger.warning("a process that has this run's key %s; disconnected it", text)

    def is_complete(self, now: float) -> bool:
        """Whether there are failures, and the time to collect more of them is over."""
        return now >= self._complete_at

    @property
    def can_unwind(self) -> bool:
        """Whether only the session must end: no process is lost, and the settings allow it."""
        is_survivable = all(failure.kind in SURVIVABLE_KINDS for failure in self.failures)
        return self.settings.unwinds and is_survivable

    @property
    def is_only_script(self) -> bool:
        """Whether only the script failed. Then the calls that it has made finish before the end.

        A rank that drops a call would leave the other ranks of that call waiting for it.
        """
        return all(failure.kind == "script" for failure in self.failures)

    def add_stopped_ranks(self, now: float) -> None:
        """Add a failure of kind "stopped" for each stopped rank that owes a reply.

        They explain why others are late. A rank is stopped if its process is, by a signal or
        debugger. If the cause so far is a deadline, a rank that missed three heartbeats counts as
        stopped too. There must be a failure already.
        """
        is_late = first_cause(self.failures).kind == "deadline"
        silent_seconds = SILENT_BEATS * self.settings.beat_seconds if is_late else float("inf")
        for rank in sorted(self._calls.owing()):
            reason = self.peers.stop_reason_or_none(rank, now, silent_seconds=silent_seconds)
            if reason and not self._is_known("stopped", rank):
                self.add_of_rank("stopped", rank, f"does not answer: {reason}")

    def stopped_ranks(self) -> list[int]:
        """Ranks whose failure is that they are stopped."""
        return [failure.rank for failure in self.failures if failure.kind == "stopped"]

    def write_cause(self) -> tuple[Failure, Path | None]:
        """Write failure.json; return (the cause, the path of the file).

        First replaces `failures` by copies with the script's line and the rank's line. Path None:
        nothing was written, because RUN_DIR no longer belongs to this run. Errors of the disk are
        logged.
        """
        self.failures = [self._with_lines(failure) for failure in self.failures]
        cause = first_cause(self.failures)
        if not self.settings.owns_run_dir():
            return cause, None
        path = self.settings.run_dir / "failure.json"
        write_failure(path, failure_record(cause, self.failures))
        return cause, path

    def _with_calls(self, kind: str, rank: int, cause: str) -> Failure:
        """Return a `Failure` of rank that names the call which it was running.

        If it runs calls in several lanes, the first (compute, transfer, files) is named, and the
        second one is appended to the cause. If it runs none, the cause says "while idle after <its
        last call>".
        """
        running = self._calls.running(rank)
        if not running:
            return Failure(kind, rank, f"{cause}, while idle {self._calls.last(rank)}".rstrip())
        call, *others = running
        if others:
            also = f"; also running {others[0].label} in the {others[0].lane} lane"
        else:
            also = ""
        return Failure(kind, rank, cause + also, call.label, call.number, call.lane)

    def _with_lines(self, failure: Failure) -> Failure:
        """Return a copy of the failure with the script's line of its call and the rank's line.

        The line that the rank was running comes from its stacks file if the kind is stopped or
        deadline and `where` is empty, and from its last heartbeat if the kind is death. Unchanged
        if the rank is not running the failure's call any more.
        """
        for call in self._calls.running(failure.rank):
            if (call.number, call.lane) == (failure.number, failure.lane):
                where = failure.where
                if failure.kind in ("stopped", "deadline") and not where:
                    where = line_in_stacks(stacks_path(self.settings.run_dir, failure.rank))
                if failure.kind == "death":  # a dead process writes no stacks
                    where = self.stalls.last_line(failure.rank, call, time.monotonic())
                return replace(failure, line=call.line, where=where)
        return failure

    def _is_known(self, kind: str, rank: int) -> bool:
        """Whether there is a failure of this kind on rank."""
        return any(failure.kind == kind and failure.rank == rank for failure in self.failures)
