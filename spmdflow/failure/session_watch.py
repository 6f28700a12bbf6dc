"""Watches a session: the start, deaths, silence, signals, and the end. The controller's side.

It runs in the io thread between messages. Calls have a watch of their own (failure/stall.py).
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

from spmdflow.failure.cause import Failure
from spmdflow.failure.collector import CONNECTION_LOST, FailureCollector
from spmdflow.failure.signals import STOP_SIGNALS

logger = logging.getLogger(__name__)

_SIGTERM_SECONDS = 2.0
"""If a failure becomes known this soon after SIGTERM, SIGTERM was a consequence of it."""
_REPEAT_SECONDS = 1.0
"""A rank may receive one Ctrl-C twice: from the terminal or batch system, and from torchrun."""
_BYE_SECONDS = 1.0
"""A rank that leaves may have ended before its BYE is read."""
_PROBE_SECONDS = 3.0
"""How long after the loss of a connection all connections are probed."""
_CLOSE_SECONDS = 30.0


class SessionWatch:
    """Adds failures of a session to the collector, except those of calls.

    Every method is called with the io lock held.
    """

    def __init__(self, collector: FailureCollector) -> None:
        """Begin to watch the start of the session."""
        self._peers = collector.peers
        self._settings = collector.settings
        self._collector = collector
        self.start_by = time.monotonic() + collector.settings.start_seconds
        """When every rank must be connected."""
        self._close_by = self._stop_at = float("inf")
        self._term_seen = self._is_closing = False
        self._interrupted: dict[int, float] = {}
        """When each rank received its first Ctrl-C."""
        self._gone_since: dict[int, float] = {}
        self._probe_until = 0.0
        self.stop_requested = False
        """Whether the run was asked to save and end."""
        self.on_stop: Callable[[], str] = lambda: "saving and stopping"
        """Called when the run is asked to. Returns what will happen, for the log."""

    def begin_close(self, now: float) -> None:
        """Expect all ranks to leave, because CLOSE was sent."""
        self._is_closing = True
        self._close_by = now + _CLOSE_SECONDS

    def on_signal(self, rank: int, number: int, now: float) -> None:
        """Act on one of `STOP_SIGNALS` that rank received: ask the script to stop, or end the run.

        SIGINT and SIGHUP ask the script to save and stop. A second Ctrl-C of a rank, more than 1 s
        after its first, ends the run at once (failure "interrupt"); so does SIGTERM after a Ctrl-C,
        because torchrun sends it after a second Ctrl-C. Any other SIGTERM becomes a request to stop
        after 2 s, unless a failure that explains it becomes known before.
        """
        first = self._interrupted.get(rank)
        if first is not None and (
            number == signal.SIGTERM or (number == signal.SIGINT and now > first + _REPEAT_SECONDS)
        ):
            if not self._collector.failures:
                self._collector.add_interrupt(rank)
        elif number == signal.SIGTERM:
            self._on_sigterm(rank, now)
        else:
            is_key = number == signal.SIGINT
            if is_key:
                self._interrupted.setdefault(rank, now)
            self._request_stop(STOP_SIGNALS[number], is_key=is_key)

    def _on_sigterm(self, rank: int, now: float) -> None:
        """Let SIGTERM become a request to stop in 2 s, unless a failure becomes known before.

        Only the first SIGTERM counts, and none after a request to stop. Logs it.
        """
        if not self._term_seen and not self.stop_requested:
            self._term_seen = True
            self._stop_at = now + _SIGTERM_SECONDS
            logger.warning("rank %d received SIGTERM", rank)

    def _request_stop(self, by: str, *, is_key: bool = False) -> None:
        """Set stop_requested, so that the script saves and ends.

        Logs the signal and what on_stop() returns. Does nothing if it is set already or if there is
        a failure. by: the signal, for the log. is_key: whether it was Ctrl-C, for which the log
        says that another one stops at once.
        """
        if self.stop_requested or self._collector.failures:
            return
        self._stop_at = float("inf")
        self.stop_requested = True
        again = "; press Ctrl-C again to stop at once" if is_key else ""
        logger.warning("asked to end by %s: %s%s", by, self.on_stop(), again)

    def on_connection_lost(self, now: float) -> None:
        """Probe all connections for a while, because one of them ended."""
        self._probe_until = now + _PROBE_SECONDS

    def check(self, now: float, probe: Callable[[int], bool]) -> None:
        """Check all time limits and processes of the session once; add failures to the collector.

        A failure is added if ranks are not connected in time, have died, or have not left in time
        after CLOSE. Logs silent ranks. Requests a stop 2 s after SIGTERM. probe(rank) sends
        something to rank, and returns whether that was possible.
        """
        if now > self.start_by:
            self.start_by = float("inf")
            self._collector.add(self._describe_missing())
        self._check_deaths(now, probe)
        if now > self._close_by:
            self._close_by = float("inf")
            cause = f"did not leave within {_CLOSE_SECONDS:g} s"
            for rank in self._peers.remaining_ranks():
                self._collector.add(Failure("deadline", rank, cause))
        self._peers.warn_about_silence(now)
        if now >= self._stop_at:
            self._request_stop("SIGTERM")

    def _describe_missing(self) -> Failure:
        """The failure of a start to which not all ranks came."""
        missing = sorted(self._peers.missing)
        return Failure(
            "start",
            missing[0],
            f"ranks {missing} of {len(self._settings.ranks)} did not connect within "
            f"{self._settings.start_seconds:g} s; see their logs (SPMDFLOW_SECRET must be the same "
            f"on every rank), or raise run.start_seconds",
        )

    def _check_deaths(self, now: float, probe: Callable[[int], bool]) -> None:
        """Add the death of each rank whose process has ended or whose connection is lost.

        Connections to other nodes are probed only for 3 s after one was lost. While the session
        closes, a rank counts as dead only after 1 s, because its BYE may not have been read yet.
        """
        gone = self._peers.ended_ranks()
        if now < self._probe_until:
            lost = self._peers.unreachable_ranks(probe)
            gone = dict.fromkeys(lost, CONNECTION_LOST) | gone
        for rank, how in gone.items():
            since = self._gone_since.setdefault(rank, now)
            if not self._is_closing or now - since > _BYE_SECONDS:
                self._collector.add_death(rank, how)
