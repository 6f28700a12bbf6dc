"""What every rank has been told and has not answered yet. Integers and clocks only.

Each lane of a rank runs its commands in the order they were sent, so the oldest unanswered one
is the one that runs, and it started when it was sent or when the one before it was answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

GRACE_SECONDS = 2.0
"""A rank reports its own missed limits; the controller waits this much longer."""


@dataclass(slots=True)
class Entry:
    """One command on its way through one lane of one rank."""

    ticket: int
    number: int
    lane: str
    label: str
    seconds: float
    since: float
    """Earliest moment at which it can have started (time.monotonic())."""
    line: str = ""
    """The script's line that gave the order."""


class Ledger:
    """Unanswered commands by rank and lane."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], deque[Entry]] = {}

    def sent(self, rank: int, entry: Entry) -> None:
        """Note that entry was sent to rank."""
        lane = self._lanes.get((rank, entry.lane))
        if lane is None:
            lane = self._lanes[rank, entry.lane] = deque()
        lane.append(entry)

    def answered(self, rank: int, lane: str, ticket: int, *, now: float) -> bool:
        """Note an answer; False if it is not the one that this lane of rank owes next."""
        entries = self._lanes.get((rank, lane))
        if not entries or entries[0].ticket != ticket:
            return False
        entries.popleft()
        if entries:
            entries[0].since = max(entries[0].since, now)
        return True

    def running(self, rank: int) -> list[Entry]:
        """What rank is running, as far as is known: at most one entry per lane."""
        lanes = (self._lanes.get((rank, lane)) for lane in ("compute", "transfer"))
        return [entries[0] for entries in lanes if entries]

    def overdue(self, now: float) -> Iterator[tuple[int, Entry]]:
        """Ranks and entries whose limit passed more than GRACE_SECONDS ago."""
        for (rank, _), entries in self._lanes.items():
            if entries and now > entries[0].since + entries[0].seconds + GRACE_SECONDS:
                yield rank, entries[0]

    def owing(self) -> set[int]:
        """Ranks that owe an answer."""
        return {rank for (rank, _), entries in self._lanes.items() if entries}
