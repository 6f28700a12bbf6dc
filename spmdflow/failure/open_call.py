"""What this package reads about calls. The session provides it (runtime/call.py).

These protocols let failures be found without knowledge of transports and results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from spmdflow.failure.duration import CallDuration, Key


class WatchedCall(Protocol):
    """A call as the script made it."""

    @property
    def number(self) -> int:
        """Numbers count up within a lane."""

    @property
    def lane(self) -> str:
        """compute, transfer or files."""

    @property
    def label(self) -> str:
        """The name that users know, such as "actor.generate_sequences"."""

    @property
    def duration_key(self) -> Key:
        """Calls with the same key take about as long."""

    @property
    def line(self) -> str:
        """The script's line that made it, as file:line: text."""

    @property
    def limit_seconds(self) -> float | None:
        """Its time limit. None: that of run.call_seconds=null (failure/limit.py)."""

    @property
    def commands(self) -> Mapping[int, Mapping[str, Any]]:
        """The command of each rank that takes part."""


class OpenCall(Protocol):
    """A call that was sent, and the replies so far."""

    @property
    def call(self) -> WatchedCall:
        """The call itself."""

    @property
    def ticket(self) -> int:
        """Identifies the call in `OpenCalls`."""

    @property
    def sent_at(self) -> float:
        """time.monotonic() of the sending."""

    @property
    def replies(self) -> Mapping[int, Any]:
        """Replies by rank."""

    @property
    def durations(self) -> Mapping[int, CallDuration]:
        """How long each rank took, as the rank reported it."""

    @property
    def answered_at(self) -> Mapping[int, float]:
        """time.monotonic() of each reply."""


class OpenCalls(Protocol):
    """All calls that lack replies."""

    @property
    def open(self) -> Mapping[int, OpenCall]:
        """The calls by ticket."""

    def last(self, rank: int) -> str:
        """What rank did before, in words. Empty if nothing."""

    def running(self, rank: int) -> Sequence[WatchedCall]:
        """The calls that rank is running, at most one per lane."""

    def start_or_none(self, rank: int, ticket: int) -> float | None:
        """time.monotonic() when rank began a call. None if it is queued there."""

    def shift(self, seconds: float) -> None:
        """Do not count these seconds, in which this process was stopped."""

    def owing(self) -> set[int]:
        """Ranks that owe a reply."""
