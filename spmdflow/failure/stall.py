"""Calls that take too long: what each rank is doing, which rank they wait for, and their limits.

`StallWatch` belongs to the controller. It knows when calls were sent and answered (`OpenCalls`),
and from heartbeats what each rank is doing. If a call runs for long (failure/duration.py), it is
reported and all ranks write their stacks. It is reported again each time its duration has doubled.

Three things end the run: a call that reaches its limit (failure/limit.py), calls that wait for rows
while no call runs that could produce them, and, with run.call_seconds=null, a rank that stays
stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from spmdflow.failure.cause import Failure
from spmdflow.failure.duration import (
    LIMIT_SECONDS,
    MAX_STOPPED_SECONDS,
    REPORT_SECONDS,
    SILENT_BEATS,
    DurationHistory,
    Key,
)
from spmdflow.failure.lane_state import (
    CODE,
    DONE,
    PEERS,
    QUEUED,
    ROWS,
    SILENT,
    STOPPED,
    LaneState,
    find_blocking_ranks,
    lane_state_of,
    name_ranks,
)
from spmdflow.failure.limit import Heartbeat, computing_seconds, limit_of
from spmdflow.failure.open_call import OpenCall, OpenCalls, WatchedCall
from spmdflow.failure.peers import Peers
from spmdflow.failure.settings import SessionSettings

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0
_FROZEN_SECONDS = 10.0
"""If two checks are this far apart, this process was stopped in between."""
_SLOW_SECONDS = 600.0
"""A slow rank is reported once in this time."""


class LaneActivity(NamedTuple):
    """One lane's part of a heartbeat."""

    number: int
    """Number of the call that the lane runs."""
    lane: str
    row_seconds: float
    """How long it has waited for rows in that call."""
    kind: str
    """The kind of its `LaneState`."""
    line: str
    """The line that it runs: "file:line in function: text"."""
    process_state: str
    """In words, if its process waits for a disk or a device; otherwise empty."""


class StallWatch:
    """Watches the open calls of a session. Every method is called with the io lock held."""

    def __init__(
        self,
        peers: Peers,
        calls: OpenCalls,
        settings: SessionSettings,
        *,
        fail: Callable[[Failure], None],
        show_stacks: Callable[[list[int]], None],
        now: float,
    ) -> None:
        """fail: ends the run. show_stacks: as in `FailureCollector`. now: time.monotonic()."""
        self._peers = peers
        self._calls = calls
        self._settings = settings
        self._fail = fail
        self._show_stacks = show_stacks
        self._history = DurationHistory()
        self._heartbeats: dict[int, tuple[float, list[LaneActivity]]] = {}
        """When the last heartbeat of each rank arrived, and what it said."""
        self._report_at: dict[int, float] = {}
        """Duration at which an open call is reported next, by ticket."""
        self._idle_since = now
        self._last_check = now
        self._report_idle_at = REPORT_SECONDS
        self._ended: dict[Key, float] = {}
        """When a call of each kind was last answered."""
        self._slow: dict[tuple[int, str], float] = {}
        """The time until which a slow rank is not reported again."""
        self._stuck_since: float | None = None
        """Since when every open call waits for rows or is queued. None: some call runs."""

    def note_heartbeat(
        self, rank: int, activities: Iterable[Sequence[Any]] | None, now: float
    ) -> None:
        """Remember a heartbeat. activities: the fields of a `LaneActivity` for each busy lane."""
        self._heartbeats[rank] = now, [LaneActivity(*fields) for fields in activities or ()]

    def end_call(self, sent: OpenCall, now: float) -> None:
        """Record the durations of a call that all ranks have answered, and warn about a slow rank.

        Also restarts the clock of idle time. A slow rank (`slow_rank_or_none`) is logged once in
        600 s for each label.
        """
        self._report_at.pop(sent.ticket, None)
        self._idle_since = now
        self._report_idle_at = REPORT_SECONDS
        self._stuck_since = None
        key = sent.call.duration_key
        if sent.call.lane == "compute":
            self._ended[key] = now
        self._history.add_call(key, sent.durations)
        slow = self._history.slow_rank_or_none(key)
        if slow is None or now < self._slow.get((slow[0], key[0]), 0.0):
            return
        rank, busy_seconds, others = slow
        self._slow[rank, key[0]] = now + _SLOW_SECONDS
        logger.warning(
            "rank %d is slow: %.1f s of work in the last calls of %s, the other ranks %.1f s "
            "(median); check what else runs on its node, and whether it has more rows",
            rank,
            busy_seconds,
            key[0],
            others,
        )

    def check(self, now: float) -> None:
        """Report calls that take long, and end the run for those that take too long.

        At most once a second. A call is reported after `report_after`, then each time its duration
        has doubled; an idle session after 60 s, then 120 s, ... If 10 s passed since the last
        check, this process was stopped, and that time is not counted for calls, silence and idle
        time.
        """
        gap = now - self._last_check
        if gap < _CHECK_SECONDS:
            return
        self._last_check = now
        if gap > _FROZEN_SECONDS:
            logger.warning("this process did not run for %.0f s", gap)
            self._peers.shift(gap)
            self._calls.shift(gap)
            self._idle_since += gap
            self._stuck_since = None
        for sent in list(self._calls.open.values()):
            seconds = self._seconds(sent, now)
            first = self._history.report_after(sent.call.duration_key)
            report_at = self._report_at.get(sent.ticket, first)
            if seconds >= report_at:
                self._report_at[sent.ticket] = 2 * seconds
                self._report(sent, seconds, now, is_first=report_at == first)
            self._check_limit(sent, seconds, now)
        self._check_waits_for_rows(now)
        idle_seconds = now - self._idle_since
        if not self._calls.open and idle_seconds >= self._report_idle_at:
            self._report_idle_at *= 2
            logger.warning(
                "no call has run for %.0f s; the script is at %s", idle_seconds, _script_line()
            )

    def last_line(self, rank: int, call: WatchedCall, now: float) -> str:
        """Return the line of rank in a call at its last heartbeat, and how long ago that was.

        The text is "file:line in function: text (3 s before)"; "" if its last heartbeat does not
        mention the call.
        """
        activity = self._activity_or_none(rank, call)
        if activity is None:
            return ""
        return f"{activity.line} ({now - self._heartbeats[rank][0]:.0f} s before)"

    def status(self, now: float) -> dict[str, Any]:
        """Return the content of RUN_DIR/status.json: plain data, with times in seconds since 1970.

        Process and silence of every rank, the open calls in words and as numbers, median and last
        end of each kind of call, and the ranks that were reported as slow in the last 600 s. If no
        call runs, the script's line.
        """
        wall = time.time()
        medians = self._history.medians()
        ranks = {}
        for rank, process in self._peers.processes.items():
            silence = self._peers.silence(rank, now)
            ranks[rank] = [process.pid, process.start_ticks, process.node, silence]
        kinds = []
        for key, ended in self._ended.items():
            kinds.append([*key, medians.get(key), wall - now + ended])
        descriptions = []
        running = []
        for sent in self._calls.open.values():
            seconds = self._seconds(sent, now)
            descriptions.append(self._describe(sent, seconds, now))
            if sent.call.lane == "compute":
                num_owing = len(sent.call.commands.keys() - sent.replies)
                running.append([*sent.call.duration_key, seconds, num_owing])
        if not descriptions:
            descriptions.append([f"no call runs; the script is at {_script_line()}"])
        slow = []
        for (rank, label), until in self._slow.items():
            if now < until:
                slow.append(f"rank {rank} in {label}")
        median_texts = {}
        for (label, phase), seconds in medians.items():
            median_texts[f"{label} ({phase})"] = seconds
        return {
            "written": wall,
            "controller": self._settings.controller_rank,
            "ranks": ranks,
            "kinds": kinds,
            "open": running,
            "calls": descriptions,
            "slow": slow,
            "medians": median_texts,
        }

    # ---- what ranks are doing

    def _seconds(self, sent: OpenCall, now: float) -> float:
        """Return how long a call has computed: the minimum over all ranks that have not replied.

        0 while one of them is queued. Waits for rows do not count (failure/limit.py,
        computing_seconds).
        """
        seconds = []
        for rank in sent.call.commands.keys() - sent.replies.keys():
            start = self._calls.start_or_none(rank, sent.ticket)
            if start is None:
                return 0.0
            activity = self._activity_or_none(rank, sent.call)
            heartbeat = None
            if activity is not None:
                heartbeat = Heartbeat(
                    at=self._heartbeats[rank][0], row_seconds=activity.row_seconds
                )
            is_silent = self._is_silent(rank, now)
            seconds.append(computing_seconds(start, heartbeat, now, is_silent=is_silent))
        return min(seconds, default=0.0)

    def _is_silent(self, rank: int, now: float) -> bool:
        """Whether several heartbeats of a rank are missing."""
        return self._peers.silence(rank, now) > SILENT_BEATS * self._settings.beat_seconds

    def _activity_or_none(self, rank: int, call: WatchedCall) -> LaneActivity | None:
        """Return the part of rank's last heartbeat about a call; None if there is none.

        It is found by the call's number and lane.
        """
        if rank not in self._heartbeats:
            return None
        for activity in self._heartbeats[rank][1]:
            if (activity.number, activity.lane) == (call.number, call.lane):
                return activity
        return None

    def _states(self, sent: OpenCall, now: float) -> dict[int, LaneState]:
        """Return rank -> what it is doing in a call, for all ranks of the call."""
        states = {}
        for rank in sent.call.commands:
            states[rank] = self._state(rank, sent, now)
        return states

    def _state(self, rank: int, sent: OpenCall, now: float) -> LaneState:
        """Return what a rank is doing in a call, from its replies, its process and its heartbeats.

        The first that applies: "done" if it has replied, "stopped", "silent" (three heartbeats
        missing), "queued", "running" at an unknown line if its last heartbeat does not mention the
        call, otherwise what that heartbeat says.
        """
        if rank in sent.answered_at:
            seconds = sent.durations[rank].seconds
            ago = now - sent.answered_at[rank]
            return LaneState(DONE, f"finished after {seconds:.1f} s, {ago:.0f} s ago")
        activity = self._activity_or_none(rank, sent.call)
        process = self._peers.processes[rank]
        line = activity.line if activity else ""
        seen = f"; last seen at {line}" if line else ""
        if process.is_stopped():
            return LaneState(STOPPED, f"{process.describe()}{seen}", line)
        if self._is_silent(rank, now):
            silence = self._peers.silence(rank, now)
            text = f"{process.describe()} and has been silent for {silence:.0f} s{seen}"
            return LaneState(SILENT, text, line)
        if self._calls.start_or_none(rank, sent.ticket) is None:
            return LaneState(QUEUED, "other calls come first")
        if activity is None:
            return LaneState(CODE, "an unknown location")
        text = line
        if activity.process_state:
            text += f" ({activity.process_state})"
        return LaneState(activity.kind, text, line)

    # ---- reports

    def _describe(self, sent: OpenCall, seconds: float, now: float) -> list[str]:
        """Return parts of a text: how long a call has run, what its ranks do, which it waits for.

        Ranks that do the same are one part. The usual duration is the median of its kind. The last
        part is the script's line, if known.
        """
        call = sent.call
        states = self._states(sent, now)
        groups = dict[str, list[int]]()
        for rank, state in sorted(states.items()):
            groups.setdefault(f"{state.kind}: {state.text}", []).append(rank)
        median = self._history.medians().get(call.duration_key)
        usual = "no call before it" if median is None else f"median {median:.2g} s"
        name = f"{call.label} (call {call.number}, {call.lane} lane)"
        parts = [f"{name} has been running for {seconds:.0f} s ({usual})"]
        for text, of_ranks in groups.items():
            parts.append(f"{name_ranks(of_ranks)} {text}")
        ranks, reason = find_blocking_ranks(states)
        if ranks:
            parts.append(f"the call waits for {name_ranks(ranks)}: {reason}")
        if call.line:
            parts.append(f"called at {call.line}")
        return parts

    def _report(self, sent: OpenCall, seconds: float, now: float, *, is_first: bool) -> None:
        """Log one warning about a call that takes long.

        The first time, all ranks also write their stacks. The first warning also has the call's
        limit and where the stacks are. Stopped and silent ranks are asked for their stacks by a
        signal.
        """
        parts = self._describe(sent, seconds, now)
        if is_first:
            limit = limit_of(sent.call, self._history)
            parts.append(f"the run ends if it takes {limit.seconds:.0f} s ({limit.reason})")
            parts.append(f"stacks: {self._settings.run_dir}/stacks-rank*.txt")
        logger.warning("%s", "; ".join(parts))
        if is_first:
            ranks = []
            for rank, state in self._states(sent, now).items():
                if state.kind in (STOPPED, SILENT):
                    ranks.append(rank)
            self._show_stacks(ranks)

    # ---- ends of the run

    def _check_limit(self, sent: OpenCall, seconds: float, now: float) -> None:
        """End the run if a call has reached its limit, or if one of its ranks stays stopped.

        seconds: how long the call has computed. A call at its limit may go on while all its ranks
        are in collectives and an earlier call runs (`_may_wait_for_others`). With
        run.call_seconds=null, a rank that owes a reply and has been stopped for 75 s ends the run
        too.
        """
        limit = limit_of(sent.call, self._history)
        if seconds >= limit.seconds:
            cause = f"not finished within {limit.seconds:.4g} s ({limit.reason})"
            if not self._may_wait_for_others(sent, now, limit_passed=now - seconds + limit.seconds):
                self._fail(self._failure_of(sent, cause, now))
        elif self._settings.call_seconds is None and seconds >= MAX_STOPPED_SECONDS:
            owing = sent.call.commands.keys() - sent.answered_at.keys()
            if any(self._stays_stopped(rank, now) for rank in owing):
                cause = f"not finished after {seconds:.0f} s"
                self._fail(self._failure_of(sent, cause, now))

    def _check_waits_for_rows(self, now: float) -> None:
        """End the run if calls have long waited for rows while no call runs that can make them.

        The limit is run.call_seconds, or 600 s if it is null, plus three heartbeat intervals. Such
        a wait has no other limit, because a wait for rows does not count against a call's own.
        """
        waiting = list(self._calls.open.values())
        if not waiting or any(self._is_running(sent, now) for sent in waiting):
            self._stuck_since = None
            return
        if self._stuck_since is None:
            self._stuck_since = now
        limit = self._settings.call_seconds or LIMIT_SECONDS
        limit += SILENT_BEATS * self._settings.beat_seconds  # the last heartbeats may be this old
        if now - self._stuck_since >= limit:
            seconds = now - self._stuck_since
            cause = (
                f"waits for rows, and nothing has run for {seconds:.0f} s; expected the call or "
                f"transfer that brings them; see the stacks"
            )
            self._fail(self._failure_of(waiting[0], cause, now))

    def _is_running(self, sent: OpenCall, now: float) -> bool:
        """Return whether a rank of a call runs code, or none waits for rows or is queued.

        A rank without a recent heartbeat about the call counts as running. Ranks that have replied
        do not count.
        """
        kinds = set()
        for rank in sent.call.commands.keys() - sent.answered_at.keys():
            activity = self._activity_or_none(rank, sent.call)
            if self._calls.start_or_none(rank, sent.ticket) is None:
                kinds.add(QUEUED)
            elif activity is None or self._is_silent(rank, now):
                kinds.add(CODE)  # it may run
            else:
                kinds.add(activity.kind)
        return CODE in kinds or not kinds & {ROWS, QUEUED}

    def _stays_stopped(self, rank: int, now: float) -> bool:
        """Whether rank has been stopped for long, not just briefly by a debugger."""
        is_silent = self._peers.silence(rank, now) >= MAX_STOPPED_SECONDS
        return is_silent and self._peers.processes[rank].is_stopped()

    def _may_wait_for_others(self, sent: OpenCall, now: float, *, limit_passed: float) -> bool:
        """Return whether all ranks of a call are in collectives while another open call runs code.

        They may wait for a rank of that call. Only calls that were sent before limit_passed, the
        time at which this call reached its limit, count, so that the limits of these calls bound
        the wait.
        """
        if {state.kind for state in self._states(sent, now).values()} != {PEERS}:
            return False
        for other in self._calls.open.values():
            if other is sent or other.sent_at > limit_passed:
                continue
            if any(state.kind == CODE for state in self._states(other, now).values()):
                return True
        return False

    def _failure_of(self, sent: OpenCall, cause: str, now: float) -> Failure:
        """Return the failure for a late call; it blames the first rank that the others wait for.

        Its kind is "stopped" if that rank is stopped, otherwise "deadline". If no rank can be
        blamed (`find_blocking_ranks`), it is the first that has not replied. If the blamed rank has
        finished the call, `where` is a line at which another one waits.
        """
        states = self._states(sent, now)
        call = sent.call
        ranks, reason = find_blocking_ranks(states)
        if not ranks:  # at the last heartbeats it was queued or waited for rows
            ranks = sorted(call.commands.keys() - sent.answered_at.keys())
            reason = f"it is {states[ranks[0]].kind}"
        state = states[ranks[0]]
        where = state.line
        if not where and state.kind == DONE:
            where = next(filter(None, (other.line for other in states.values())), "")
        also = f" (also {name_ranks(ranks[1:])})" if ranks[1:] else ""
        return Failure(
            "stopped" if state.kind == STOPPED else "deadline",
            ranks[0],
            f"{cause}{also}: {reason}",
            call.label,
            call.number,
            call.lane,
            line=call.line,
            where=where,
        )


def _script_line() -> str:
    """Return the line that the script's thread ("controller") runs; "" without such a thread."""
    for thread in threading.enumerate():
        if thread.name == "controller" and thread.ident is not None:
            state = lane_state_of(thread.ident, None)
            if state is not None:
                return state.line
            return ""
    return ""
