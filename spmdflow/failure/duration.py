"""How long calls take, and what follows from it: limits, and ranks that are slow. Pure.

Each duration is measured by one rank on its own clock. Time spent waiting for rows does not count.
`DurationHistory` keeps the last calls of each kind (label and phase).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

REPORT_SECONDS = 60.0
REPORT_FACTOR = 5.0
"""A call that takes this long, or this many medians if that is longer, is reported."""
LIMIT_SECONDS = 600.0
LIMIT_FACTOR = 20.0
"""The same for the end of the run (run.call_seconds=null): a usually fast call may stall once."""
MAX_STOPPED_SECONDS = 75.0
"""A rank that is known to be stopped ends the run after this time."""
SILENT_BEATS = 3
"""A rank is silent if this many of its heartbeats are missing."""
MIN_CALLS = 3
"""A call has a limit of its own only after this many earlier calls of its kind."""
_NUM_KEPT = 10
"""Calls of each kind that are remembered."""
_SLOW_FACTOR = 1.5
_SLOW_SECONDS = 10.0

Key = tuple[str, str]
"""Label and phase of a call."""


@dataclass(frozen=True)
class CallDuration:
    """How long one rank took for one call."""

    seconds: float
    """Without the time in which it waited for rows."""
    wait_seconds: float = 0.0
    """The part of `seconds` in which it waited for other ranks, in a collective."""


class DurationHistory:
    """The durations of recent calls."""

    def __init__(self) -> None:
        """Begins empty."""
        self._longest: defaultdict[Key, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        """Seconds of the slowest rank of each call."""
        self._busy: dict[Key, tuple[float, dict[int, float]]] = {}
        """Number of calls, and seconds of each rank without waiting for others. Both decay."""

    def add_call(self, key: Key, durations: Mapping[int, CallDuration]) -> None:
        """Add the durations of a finished call, by rank, to the history of its kind.

        The longest of them is kept for the last 10 calls. The seconds that each rank did not wait
        for others are summed; sums and number of calls are halved once they cover more than 20
        calls, and restart from 0 if the call has other ranks than before.
        """
        self._longest[key].append(max(each.seconds for each in durations.values()))
        num_calls, busy = self._busy.get(key, (0.0, {}))
        if busy.keys() != durations.keys():
            num_calls = 0.0
            busy = dict.fromkeys(durations, 0.0)
        decay = 0.5 if num_calls > 2 * _NUM_KEPT else 1.0
        seconds = {}
        for rank, each in durations.items():
            seconds[rank] = decay * busy[rank] + each.seconds - each.wait_seconds
        self._busy[key] = decay * num_calls + 1.0, seconds

    def medians(self) -> dict[Key, float]:
        """Return the median seconds of the last 10 calls of each kind: (label, phase) -> seconds.

        A call counts with its slowest rank.
        """
        result = {}
        for key, longest in self._longest.items():
            result[key] = median(longest)
        return result

    def report_after(self, key: Key) -> float:
        """Seconds after which a running call is reported."""
        longest = self._longest.get(key)
        return max(REPORT_SECONDS, REPORT_FACTOR * median(longest) if longest else 0.0)

    def limit_or_none(self, key: Key) -> float | None:
        """Return the seconds after which a call counts as hung: 20 medians, but at least 600 s.

        None if fewer than 3 calls of its kind have finished.
        """
        longest = self._longest.get(key, ())
        if len(longest) < MIN_CALLS:
            return None
        return max(LIMIT_SECONDS, LIMIT_FACTOR * median(longest))

    def slow_rank_or_none(self, key: Key) -> tuple[int, float, float] | None:
        """Return the rank that delays recent calls: (rank, its busy seconds, the others' median).

        Busy seconds: those in which a rank did not wait for other ranks, summed over recent calls.
        The busiest rank is slow if it has at least 1.5 times the others' median, and at least 10 s
        more. Otherwise None, as with fewer than 2 ranks or 3 calls.
        """
        num_calls, busy = self._busy.get(key, (0.0, {}))
        if len(busy) < 2 or num_calls < MIN_CALLS:
            return None
        slowest = max(busy, key=lambda rank: busy[rank])
        others = median(seconds for rank, seconds in busy.items() if rank != slowest)
        if busy[slowest] < max(_SLOW_FACTOR * others, others + _SLOW_SECONDS):
            return None
        return slowest, busy[slowest], others
