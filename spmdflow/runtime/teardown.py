"""Ends a failed session on every rank. The controller's side.

Nothing here waits for the script or for a lane. A thread inside a collective receives nothing, but
a process that exits releases its peers at once. So the processes are ended. Only a session inside a
host program whose processes are all alive is unwound instead: every lane is left, and all processes
continue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from functools import partial

from spmdflow.errors import RunFailed
from spmdflow.failure.cause import (
    SHOW_SECONDS,
    UNWIND_SECONDS,
    Failure,
    call_within,
    print_report,
    run_failed,
)
from spmdflow.failure.collector import FailureCollector
from spmdflow.failure.stacks import dump_stacks, stacks_path
from spmdflow.runtime.call import Pending
from spmdflow.runtime.wire import Hub, Kind

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 3.0
"""Processes of this node that have not ended this long after ABORT are killed."""
_SEND_SECONDS = 0.5
"""Time for ABORT to reach other nodes before this process ends."""


class Teardown:
    """Ends a session because of the failures that were collected.

    Every method is called with the io lock held.
    """

    def __init__(self, hub: Hub, collector: FailureCollector) -> None:
        """hub: reaches the ranks."""
        self._hub = hub
        self._collector = collector
        self._peers = collector.peers
        self._settings = collector.settings
        self.cause: Failure | None = None
        """Why the session was unwound; None if it was not."""
        self.unwound = threading.Event()
        """Set once all ranks have been told to unwind."""
        self.unwinding = set(collector.settings.ranks)
        """Ranks that have not left their lanes yet."""
        self._unwind_by = float("inf")

    def is_due(self, now: float) -> bool:
        """Whether `unwind`, `check_unwinding` or `abort` has to be called."""
        if self.cause is None:
            return self._collector.is_complete(now)
        return now >= self._unwind_by or not self._collector.can_unwind

    def unwind(self, pending: Iterable[Pending]) -> None:
        """End the session on every rank, while all processes continue.

        Writes failure.json, logs the cause, sends UNWIND to every rank, and lets all pending
        results raise RunFailed. Sets `cause` and `unwound`. Ranks then have 10 s to leave their
        lanes.
        """
        self.cause, path = self._collector.write_cause()
        details = path or "not written, because RUN_DIR no longer belongs to this run"
        logger.error("run failed: %s; details: %s", self.cause.sentence(), details)
        for rank in self._settings.ranks:
            self._hub.send(rank, self._hub.seal(Kind.UNWIND, self.cause))
        for waiting in pending:
            waiting.fail(RunFailed(self.cause.sentence()))
        self._unwind_by = time.monotonic() + UNWIND_SECONDS
        self.unwound.set()

    def check_unwinding(self, now: float) -> None:
        """Add a failure of kind "deadline" for each rank that has not left its lanes within 10 s.

        Does nothing before that time. Such a failure makes `abort` necessary.
        """
        if now <= self._unwind_by:
            return
        for rank in sorted(self.unwinding):
            cause = f"did not leave the failed run within {UNWIND_SECONDS:g} s"
            self._collector.add_of_rank("deadline", rank, cause)

    def abort(self, pending: Iterable[Pending]) -> None:
        """End the processes of all other ranks; the caller then ends this one.

        In this order: kills stopped ranks of this node, writes failure.json and prints the cause,
        sends ABORT, writes this process's stacks, lets pending results raise RunFailed, calls
        on_failure, waits for the processes to exit (kills late ones of this node), and calls
        show_failure.
        """
        self._collector.add_stopped_ranks(time.monotonic())
        stopped = self._collector.stopped_ranks()
        self._peers.kill(stopped)  # they write their stacks first
        cause, path = self._collector.write_cause()
        print_report(cause, self._collector.failures, path)
        envelope = self._hub.seal(Kind.ABORT, stopped)
        for rank in self._settings.ranks[1:]:
            self._hub.send(rank, envelope)
        own_stacks = stacks_path(self._settings.run_dir, self._settings.controller_rank)
        dump_stacks(own_stacks, f"run failed: {cause.sentence()}", self._settings.owns_run_dir)
        for waiting in pending:
            waiting.fail(RunFailed(cause.sentence()))
        if (on_failure := self._settings.on_failure) is not None:
            call_within(_SEND_SECONDS, partial(on_failure, run_failed(cause)))
        self._await_exits()
        call_within(SHOW_SECONDS, self._settings.show_failure)

    def _await_exits(self) -> None:
        """Wait up to 3 s for the other ranks of this node to exit, then kill the remaining ones.

        If there are ranks on other nodes, it waits at least 0.5 s, so that ABORT reaches them.
        """
        all_here = all(process.is_local() for process in self._peers.processes.values())
        start = time.monotonic()
        while time.monotonic() - start < _EXIT_SECONDS:
            is_sent = all_here or time.monotonic() - start > _SEND_SECONDS
            if is_sent and not self._peers.local_survivors():
                return
            time.sleep(0.02)
        self._peers.kill(self._peers.local_survivors())
