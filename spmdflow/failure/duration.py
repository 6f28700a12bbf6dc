"""How long calls take, and what follows from it: limits, and ranks that are slow. Pure.

Seconds are durations, each measured by one rank on its own clock; the time that a rank waited for
rows does not count. `Pace` keeps the last calls of each kind (label and phase).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

LOOK_SECONDS = 60.0
LOOK_FACTOR = 5.0
"""A call is looked at after this time, or after so many medians if that is longer."""
LIMIT_SECONDS = 600.0
LIMIT_FACTOR = 20.0
"""The same for the end of the run (run.call_seconds=auto): a usually fast call may stall once."""
HELD_SECONDS = 75.0
"""A rank that is known to be stopped for so long ends the run sooner."""
SILENT_BEATS = 3
"""A rank is silent when so many of its heartbeats are missing."""
FEWEST_CALLS = 3
"""Without as many calls before it, a call has no limit of its own."""
_KEPT = 10
_SLOW_FACTOR = 1.5
_SLOW_SECONDS = 10.0

Key = tuple[str, str]
"""Label and phase of a call."""


@dataclass(frozen=True)
class Took:
    """How long one rank took for one call."""

    seconds: float
    """Without the time in which it waited for rows."""
    waited: float = 0.0
    """Of these: seconds in which it waited for other ranks, in a collective."""


class Pace:
    """The durations of recent calls."""

    def __init__(self) -> None:
        self._longest: defaultdict[Key, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        """Seconds of the slowest rank of each call."""
        self._own: dict[Key, tuple[float, dict[int, float]]] = {}
        """Number of calls, and seconds of each rank without waiting for others; both fade."""

    def note(self, key: Key, took: Mapping[int, Took]) -> None:
        """Note a finished call: how long each of its ranks took."""
        self._longest[key].append(max(each.seconds for each in took.values()))
        number, own = self._own.get(key, (0.0, {}))
        if own.keys() != took.keys():
            number = 0.0
            own = dict.fromkeys(took, 0.0)
        kept = 0.5 if number > 2 * _KEPT else 1.0
        own = {r: kept * own[r] + each.seconds - each.waited for r, each in took.items()}
        self._own[key] = kept * number + 1.0, own

    def medians(self) -> dict[Key, float]:
        """Median seconds of every kind of call; of each call, its slowest rank counts."""
        result = {}
        for key, longest in self._longest.items():
            result[key] = median(longest)
        return result

    def look_after(self, key: Key) -> float:
        """Seconds after which a call is worth a line."""
        known = self._longest.get(key)
        return max(LOOK_SECONDS, LOOK_FACTOR * median(known) if known else 0.0)

    def limit_or_none(self, key: Key) -> float | None:
        """Seconds after which a call counts as hung; None: there were too few to tell."""
        known = self._longest.get(key, ())
        if len(known) < FEWEST_CALLS:
            return None
        return max(LIMIT_SECONDS, LIMIT_FACTOR * median(known))

    def slow_rank_or_none(self, key: Key) -> tuple[int, float, float] | None:
        """The rank that holds up recent calls: (rank, its own seconds, median of the others').

        Own seconds are those in which a rank did not wait for others, of all recent calls.
        """
        number, own = self._own.get(key, (0.0, {}))
        if len(own) < 2 or number < FEWEST_CALLS:
            return None
        slowest = max(own, key=lambda rank: own[rank])
        others = median(seconds for rank, seconds in own.items() if rank != slowest)
        if own[slowest] < max(_SLOW_FACTOR * others, others + _SLOW_SECONDS):
            return None
        return slowest, own[slowest], others
