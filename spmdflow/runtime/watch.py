"""What the io thread looks at between messages: limits, deaths, silence, SIGTERM."""

from __future__ import annotations

import logging
from collections.abc import Callable

from spmdflow.runtime.failure import Failure
from spmdflow.runtime.ledger import Ledger
from spmdflow.runtime.peers import Peers
from spmdflow.runtime.settings import SessionSettings
from spmdflow.runtime.verdict import LOST, Verdict

logger = logging.getLogger(__name__)

_SIGTERM_SECONDS = 2.0
"""SIGTERM means the end of a failed run if a failure becomes known within this time."""
_PARTING_SECONDS = 1.0
"""A rank that leaves may be gone before its BYE is read."""
_PROBE_SECONDS = 3.0
_CLOSE_SECONDS = 30.0


class Watch:
    """The clocks of a session; every method is called with the io lock held."""

    def __init__(
        self,
        peers: Peers,
        ledger: Ledger,
        verdict: Verdict,
        *,
        settings: SessionSettings,
        start_by: float,
    ) -> None:
        self._peers, self._ledger, self._verdict = peers, ledger, verdict
        self._settings = settings
        self._start_by = start_by
        self._close_by = self._stop_at = float("inf")
        self._term_seen = self._is_closing = False
        self._gone_since: dict[int, float] = {}
        self._probe_until = 0.0
        self.stop_requested = False
        """Whether the run was asked to save and end."""

    def all_met(self) -> None:
        """Every rank is connected: the limit for the start is over."""
        self._start_by = float("inf")

    def closing(self, now: float) -> None:
        """CLOSE was sent: from here on ranks leave."""
        self._is_closing, self._close_by = True, now + _CLOSE_SECONDS

    def term_arrived(self, rank: int, now: float) -> None:
        """A rank received SIGTERM: a failed run, or a wish to end."""
        if not self._term_seen:
            self._term_seen, self._stop_at = True, now + _SIGTERM_SECONDS
            logger.warning("rank %d received SIGTERM", rank)

    def connection_lost(self, now: float) -> None:
        """Some connection ended: find out whose, for as long as libzmq may need to know."""
        self._probe_until = now + _PROBE_SECONDS

    def look(self, now: float, probe: Callable[[int], bool]) -> None:
        """Check everything once; probe(rank) sends something and says whether it could."""
        self._check_start(now)
        self._check_deaths(now, probe)
        self._check_limits(now)
        self._peers.warn_about_silence(now)
        if now >= self._stop_at and not self._verdict.failures:
            self._request_stop()

    def _check_start(self, now: float) -> None:
        if now <= self._start_by:
            return
        self._start_by = float("inf")
        missing = self._peers.missing()
        self._verdict.add(
            Failure(
                "start",
                missing[0],
                f"ranks {missing} did not connect within {self._settings.start_seconds:g} s; "
                f"expected all of {len(self._settings.ranks)}; see their logs (SPMDFLOW_SECRET "
                f"must be the same everywhere), or raise run.start_seconds",
            )
        )

    def _check_deaths(self, now: float, probe: Callable[[int], bool]) -> None:
        gone = self._peers.ended()
        if now < self._probe_until:
            gone = dict.fromkeys(self._peers.unreachable(probe), LOST) | gone
        for rank, how in gone.items():
            since = self._gone_since.setdefault(rank, now)
            if not self._is_closing or now - since > _PARTING_SECONDS:
                self._verdict.add_death(rank, how)

    def _check_limits(self, now: float) -> None:
        for rank, entry in self._ledger.overdue(now):
            self._verdict.add_overdue(rank, entry, now)
        if now > self._close_by:
            self._close_by = float("inf")
            for rank in self._peers.staying():
                self._verdict.add(
                    Failure("deadline", rank, f"did not leave within {_CLOSE_SECONDS:g} s")
                )

    def _request_stop(self) -> None:
        self._stop_at = float("inf")
        self.stop_requested = True
        logger.warning("asked to end by SIGTERM: saving and stopping")
        if self._settings.on_sigterm:
            self._settings.on_sigterm()
