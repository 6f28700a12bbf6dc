"""The time limit of a call, and the time that counts against it. Pure.

Only the controller enforces limits (failure/stall.py).

- `limit_seconds` of a call (run.call_seconds, or that of a transfer) is its limit if it is set.
- With run.call_seconds=null, the limit of a call that was made a few times is a multiple of the
  median of its earlier durations, however long that is.
- The limit of other calls, and of work with disks or hubs, is an hour.

Only time in which every rank that has not replied computes counts. A rank that is queued, or that
waits for rows of another call, does not compute: the call that it waits for has a limit of its own.
What a rank itself waits for (a collective, rows) has no shorter limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from spmdflow.failure.duration import LIMIT_FACTOR, LIMIT_SECONDS, MIN_CALLS, DurationHistory
from spmdflow.failure.open_call import WatchedCall

BOUNDED = ("call", "map", "join", "fetch")
"""Operations whose limits come from medians. Others use disks, hubs or compilers."""
FIRST_SECONDS = 3600.0
"""The limit of calls without a median, and of other operations, if none is set."""


@dataclass(frozen=True)
class Limit:
    """After how many seconds a call ends the run, and the reason for this number."""

    seconds: float
    reason: str


def limit_of(call: WatchedCall, history: DurationHistory) -> Limit:
    """Return the time limit of a call, and the reason for it in words.

    The call's own limit_seconds if it is set. Otherwise 3600 s for operations other than `BOUNDED`,
    and for calls of which fewer than 3 have finished. Otherwise 20 medians of earlier calls of its
    kind, at least 600 s. history: durations of earlier calls.
    """
    if call.limit_seconds is not None:
        return Limit(call.limit_seconds, "the limit that is set")
    operations = set()
    for command in call.commands.values():
        operations.add(command.get("operation"))
    if not operations <= set(BOUNDED):
        return Limit(FIRST_SECONDS, "the limit of starts, checkpoints and work with disks")
    from_median = history.limit_or_none(call.duration_key)
    if from_median is None:
        reason = f"the limit before it was made {MIN_CALLS} times; run.call_seconds sets another"
        return Limit(FIRST_SECONDS, reason)
    median = history.medians()[call.duration_key]
    reason = f"{LIMIT_FACTOR:g} medians of {median:.2g} s, at least {LIMIT_SECONDS:g} s"
    return Limit(from_median, reason)


@dataclass(frozen=True)
class Heartbeat:
    """What the last heartbeat of a rank says about a call that it runs."""

    at: float
    """When it arrived, on the clock of `computing_seconds`."""
    row_seconds: float
    """How long the rank had waited for rows in the call until then."""


def computing_seconds(
    start: float, heartbeat: Heartbeat | None, now: float, *, is_silent: bool
) -> float:
    """Return how long a rank has computed in a call that it began at `start`.

    heartbeat.at - start - heartbeat.row_seconds, at least 0. Time after the last heartbeat does not
    count, because the rank may have waited for rows since. 0 if none has arrived during the call
    (None). is_silent: the rank sends no heartbeats any more; then `now` replaces heartbeat.at.
    """
    until = start if heartbeat is None else heartbeat.at
    row_seconds = 0.0 if heartbeat is None else heartbeat.row_seconds
    if is_silent:
        until = now
    return max(0.0, until - start - row_seconds)
