"""The limit of a call, and the time that counts against it. Pure.

This is the one definition of both; the controller is the one that enforces it (runtime/stall.py).

- A call that was given a limit (`Call.limit_seconds`: run.call_seconds, a transfer) has that one.
- With run.call_seconds=null, a call that was made a few times has many medians of its earlier
  times as its limit, however long that is.
- A call that was made less often, and work with disks or hubs, has an hour.

What counts is the time in which every rank that has not answered computes. A rank that waits for
rows of another call, or for its turn, does not compute: the call that it waits for has a limit.
Nothing that a rank waits for itself (a collective, rows) ends earlier: such limits are long.
"""

from __future__ import annotations

from dataclasses import dataclass

from spmdflow.failure.duration import FEWEST_CALLS, LIMIT_FACTOR, LIMIT_SECONDS, Pace
from spmdflow.runtime.call import Call

BOUNDED = ("call", "map", "join", "fetch")
"""Operations whose limits come from medians; a disk, a hub or a compiler may take its time."""
FIRST_SECONDS = 3600.0
"""The limit of calls without a median, and of other work, where none is set."""


@dataclass(frozen=True)
class Limit:
    """After how many seconds a call ends the run, and why then."""

    seconds: float
    reason: str


def limit_of(call: Call, pace: Pace) -> Limit:
    """The limit of an order; pace: the durations of calls before it."""
    if call.limit_seconds is not None:
        return Limit(call.limit_seconds, "the limit that is set")
    operations = set()
    for command in call.commands.values():
        operations.add(command.get("operation"))
    if not operations <= set(BOUNDED):
        return Limit(FIRST_SECONDS, "the limit of starts, checkpoints and work with disks")
    measured = pace.limit_or_none(call.duration_key)
    if measured is None:
        reason = f"the limit before it was made {FEWEST_CALLS} times; run.call_seconds sets another"
        return Limit(FIRST_SECONDS, reason)
    median = pace.medians()[call.duration_key]
    reason = f"{LIMIT_FACTOR:g} medians of {median:.2g} s, at least {LIMIT_SECONDS:g} s"
    return Limit(measured, reason)


@dataclass(frozen=True)
class Heard:
    """What a rank's last heartbeat said of a call that it runs."""

    at: float
    """When it came, on the clock of `computing_seconds`."""
    row_seconds: float
    """How long the rank had waited for rows in the call until then."""


def computing_seconds(start: float, heard: Heard | None, now: float, *, is_silent: bool) -> float:
    """How long a rank has computed in a call that it began at start.

    Only what a heartbeat has told counts: a rank may wait for rows since. heard: None if no
    heartbeat came since it began. is_silent: no heartbeat is due any more, so all time counts.
    """
    until = start if heard is None else heard.at
    waited = 0.0 if heard is None else heard.row_seconds
    if is_silent:
        until = now
    return max(0.0, until - start - waited)
