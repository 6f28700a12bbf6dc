"""Calls that take too long: who is where, whom the others wait for, and when that ends the run.

`Stalls` belongs to the controller; every method is called with the io lock held. It knows the
clocks of the calls (Ledger), and from heartbeats what each rank does. After a while
(failure/duration.py) a call that still runs is printed, and all ranks write their stacks; again
each time twice as long has passed. A call that reaches its limit (runtime/limit.py) ends the run.
So do ranks that wait for rows while no call runs that could bring them, and, where run.call_seconds
is auto, a rank that stays stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from spmdflow.failure.cause import Failure
from spmdflow.failure.duration import (
    HELD_SECONDS,
    LIMIT_SECONDS,
    LOOK_SECONDS,
    SILENT_BEATS,
    Key,
    Pace,
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
    blame,
    name_ranks,
    place_of,
)
from spmdflow.runtime.call import Call, Ledger, Pending
from spmdflow.runtime.limit import Heard, computing_seconds, limit_of
from spmdflow.runtime.peers import Peers
from spmdflow.runtime.rendezvous import SessionSettings

logger = logging.getLogger(__name__)

_LOOK_EVERY = 1.0
_FROZEN_SECONDS = 10.0
"""So long between two looks: this process itself was stopped meanwhile."""
_SLOW_EVERY = 600.0

Doing = Sequence[Any]
"""One lane's part of a heartbeat: [call, lane, seconds waited for rows, kind, line, state]."""


class Stalls:
    """Watches the open calls of a session."""

    def __init__(
        self,
        peers: Peers,
        ledger: Ledger,
        settings: SessionSettings,
        *,
        fail: Callable[[Failure], None],
        show: Callable[[list[int]], None],
        now: float,
    ) -> None:
        """fail: ends the run. show: all ranks write their stacks; those given, on a signal."""
        self._peers = peers
        self._ledger = ledger
        self._settings = settings
        self._fail = fail
        self._show = show
        self._pace = Pace()
        self._beats: dict[int, tuple[float, Sequence[Doing]]] = {}
        self._due: dict[int, float] = {}
        """Seconds at which an open call is printed next, by ticket."""
        self._idle_since = self._last_look = now
        self._idle_due = LOOK_SECONDS
        self._ended: dict[Key, float] = {}
        """When a call of each kind was answered last."""
        self._slow: dict[tuple[int, str], float] = {}
        """Until when a slow rank is not printed again."""
        self._stuck_since: float | None = None
        """Since when every open call waits for rows or for its turn; None: some call runs."""

    def note_heartbeat(self, rank: int, doing: Sequence[Doing] | None, now: float) -> None:
        """A heartbeat."""
        self._beats[rank] = now, doing or ()

    def end_call(self, pending: Pending, now: float) -> None:
        """All ranks of a call have answered."""
        self._due.pop(pending.ticket, None)
        self._idle_since = now
        self._idle_due = LOOK_SECONDS
        self._stuck_since = None
        key = pending.call.duration_key
        if pending.call.lane == "compute":
            self._ended[key] = now
        self._pace.note(key, pending.durations)
        slow = self._pace.slow_rank_or_none(key)
        if slow is None or now < self._slow.get((slow[0], key[0]), 0.0):
            return
        rank, own, others = slow
        self._slow[rank, key[0]] = now + _SLOW_EVERY
        logger.warning(
            "rank %d is slow: %.1f s of its own in the last calls of %s, the other ranks %.1f s "
            "(median); see what else runs on its node, and whether it has more rows",
            *(rank, own, key[0], others),
        )

    def look(self, now: float) -> None:
        """Print what takes long, end what takes too long."""
        if (gap := now - self._last_look) < _LOOK_EVERY:
            return
        self._last_look = now
        if gap > _FROZEN_SECONDS:
            logger.warning("this process did not run for %.0f s", gap)
            self._peers.shift(gap)
            self._ledger.shift(gap)
            self._idle_since += gap
            self._stuck_since = None
        for pending in list(self._ledger.open.values()):
            seconds = self._seconds(pending, now)
            first = self._pace.look_after(pending.call.duration_key)
            due = self._due.get(pending.ticket, first)
            if seconds >= due:
                self._due[pending.ticket] = 2 * seconds
                self._tell(pending, seconds, now, is_first=due == first)
            self._check_limit(pending, seconds, now)
        self._check_waits_for_rows(now)
        if not self._ledger.open and now - self._idle_since >= self._idle_due:
            self._idle_due *= 2
            seconds = now - self._idle_since
            logger.warning("no call runs for %.0f s; the script is at %s", seconds, _script_line())

    def last_line(self, rank: int, call: Call, now: float) -> str:
        """Where rank was in a call by its last heartbeat, and when; empty if it did not tell."""
        doing = self._heard_doing(rank, call)
        if doing:
            return f"{doing[4]} ({now - self._beats[rank][0]:.0f} s before)"
        return ""

    def state(self, now: float) -> dict[str, Any]:
        """What RUN_DIR/status.json holds: plain data, times in seconds since 1970."""
        wall = time.time()
        medians = self._pace.medians()
        calls = []
        for pending in self._ledger.open.values():
            calls.append(self._describe(pending, self._seconds(pending, now), now))
        ranks = {}
        for rank, process in self._peers.processes.items():
            ranks[rank] = [
                process.pid,
                process.start_ticks,
                process.node,
                self._peers.silence(rank, now),
            ]
        slow = []
        for (rank, label), t in self._slow.items():
            if now < t:
                slow.append(f"rank {rank} in {label}")
        shown = {}
        for (label, phase), seconds in medians.items():
            shown[f"{label} ({phase})"] = seconds
        facts = {"written": wall, "controller": self._settings.controller_rank, "ranks": ranks}
        if calls:
            idle = []
        else:
            idle = [[f"no call runs; the script is at {_script_line()}"]]
        kinds = []
        for key, at in self._ended.items():
            kinds.append([*key, medians.get(key), wall - now + at])
        running = []
        for pending in self._ledger.open.values():
            if pending.call.lane == "compute":
                running.append(
                    [
                        *pending.call.duration_key,
                        self._seconds(pending, now),
                        len(pending.call.commands.keys() - pending.replies),
                    ]
                )
        facts |= {"kinds": kinds, "open": running}
        return facts | {"calls": calls + idle, "slow": slow, "medians": shown}

    # ---- one call

    def _seconds(self, pending: Pending, now: float) -> float:
        """How long all its ranks that have not answered compute in a call (runtime/limit.py)."""
        found = []
        for rank in pending.call.commands.keys() - pending.replies.keys():
            start = self._ledger.start_or_none(rank, pending.ticket)
            if start is None:
                return 0.0
            doing = self._heard_doing(rank, pending.call)
            if doing:
                heard = Heard(at=self._beats[rank][0], row_seconds=doing[2])
            else:
                heard = None
            is_silent = self._is_silent(rank, now)
            found.append(computing_seconds(start, heard, now, is_silent=is_silent))
        return min(found, default=0.0)

    def _is_silent(self, rank: int, now: float) -> bool:
        """Whether several heartbeats of a rank are missing."""
        return self._peers.silence(rank, now) > SILENT_BEATS * self._settings.beat_seconds

    def _heard_doing(self, rank: int, call: Call) -> Doing | None:
        """What rank said that it does in a call."""
        for doing in self._beats[rank][1] if rank in self._beats else ():
            if list(doing[:2]) == [call.number, call.lane]:
                return doing
        return None

    def _doing(self, pending: Pending, now: float) -> dict[int, LaneState]:
        """What every rank of a call does."""
        result = {}
        for rank in pending.call.commands:
            result[rank] = self._place(rank, pending, now)
        return result

    def _place(self, rank: int, pending: Pending, now: float) -> LaneState:
        if rank in pending.answered_at:
            took = pending.durations[rank].seconds
            ago = now - pending.answered_at[rank]
            return LaneState(DONE, f"finished after {took:.1f} s, {ago:.0f} s ago")
        doing = self._heard_doing(rank, pending.call)
        process = self._peers.processes[rank]
        line = doing[4] if doing else ""
        seen = f"; last seen at {line}" if line else ""
        silent = self._peers.silence(rank, now)
        if process.is_stopped():
            return LaneState(STOPPED, f"{process.describe()}{seen}", line)
        if self._is_silent(rank, now):
            text = f"{process.describe()} and has been silent for {silent:.0f} s{seen}"
            return LaneState(SILENT, text, line)
        if self._ledger.start_or_none(rank, pending.ticket) is None:
            return LaneState(QUEUED, "other calls come first")
        if not doing:
            return LaneState(CODE, "a line not known yet")
        return LaneState(doing[3], line + (f" ({doing[5]})" if doing[5] else ""), line)

    def _describe(self, pending: Pending, seconds: float, now: float) -> list[str]:
        """A call in words: since when, which rank does what, whom it waits for, who called."""
        call = pending.call
        doing = self._doing(pending, now)
        groups = dict[str, list[int]]()
        for rank, place in sorted(doing.items()):
            groups.setdefault(f"{place.kind}: {place.text}", []).append(rank)
        known = self._pace.medians().get(call.duration_key)
        ranks, why = blame(doing)
        usual = "no call before it" if known is None else f"median {known:.2g} s"
        name = f"{call.label} (call {call.number}, {call.lane} lane)"
        parts = [f"{name} runs for {seconds:.0f} s ({usual})"]
        parts += [f"{name_ranks(of)} {text}" for text, of in groups.items()]
        parts += [f"the call waits for {name_ranks(ranks)}: {why}"] if ranks else []
        return parts + ([f"called at {call.line}"] if call.line else [])

    def _tell(self, pending: Pending, seconds: float, now: float, *, is_first: bool) -> None:
        """One line about a call; the first time all ranks write their stacks."""
        limit = limit_of(pending.call, self._pace)
        end = f"the run ends if it takes {limit.seconds:.0f} s ({limit.reason})"
        if is_first:
            more = [end, f"stacks: {self._settings.run_dir}/stacks-rank*.txt"]
        else:
            more = []
        logger.warning("%s", "; ".join(self._describe(pending, seconds, now) + more))
        if is_first:
            doing = self._doing(pending, now).items()
            self._show([rank for rank, place in doing if place.kind in (STOPPED, SILENT)])

    def _check_limit(self, pending: Pending, seconds: float, now: float) -> None:
        """End the run if this call has reached its limit, or one of its ranks is stopped."""
        limit = limit_of(pending.call, self._pace)
        if seconds >= limit.seconds:
            cause = f"not finished within {limit.seconds:.4g} s ({limit.reason})"
            if not self._may_wait_for_others(
                pending, now, limit_passed=now - seconds + limit.seconds
            ):
                self._fail(self._failure_of(pending, cause, now))
        elif self._settings.call_seconds is None and seconds >= HELD_SECONDS:
            owing = pending.call.commands.keys() - pending.answered_at.keys()
            if any(self._is_held(rank, now) for rank in owing):
                cause = f"not finished after {seconds:.0f} s"
                self._fail(self._failure_of(pending, cause, now))

    def _check_waits_for_rows(self, now: float) -> None:
        """End the run if calls wait for rows, and no other call has run for long.

        The producer's limit bounds a wait for rows. If nothing runs, no limit would.
        """
        waiting = list(self._ledger.open.values())
        if not waiting or any(self._runs(pending, now) for pending in waiting):
            self._stuck_since = None
            return
        if self._stuck_since is None:
            self._stuck_since = now
        limit = self._settings.call_seconds or LIMIT_SECONDS
        limit += SILENT_BEATS * self._settings.beat_seconds  # what heartbeats said may be old
        if now - self._stuck_since >= limit:
            late = f"waits for rows, and nothing has run for {now - self._stuck_since:.0f} s"
            cause = f"{late}; expected the call or transfer that brings them; see the stacks"
            self._fail(self._failure_of(waiting[0], cause, now))

    def _runs(self, pending: Pending, now: float) -> bool:
        """Whether a call runs: it waits neither for rows nor for its turn on any rank."""
        kinds = set()
        for rank in pending.call.commands.keys() - pending.answered_at.keys():
            doing = self._heard_doing(rank, pending.call)
            if self._ledger.start_or_none(rank, pending.ticket) is None:
                kinds.add(QUEUED)
            elif doing is None or self._is_silent(rank, now):
                kinds.add(CODE)  # it may run
            else:
                kinds.add(doing[3])
        return CODE in kinds or not kinds & {ROWS, QUEUED}

    def _is_held(self, rank: int, now: float) -> bool:
        """Whether rank is stopped since long, not only for a debugger's look."""
        is_silent = self._peers.silence(rank, now) >= HELD_SECONDS
        return is_silent and self._peers.processes[rank].is_stopped()

    def _may_wait_for_others(self, pending: Pending, now: float, *, limit_passed: float) -> bool:
        """Whether all its ranks are in collectives while another call runs: of its ranks, maybe.

        limit_passed: when this one's limit did. Calls that were sent later are no excuse, so that
        the limits of those before bound the wait.
        """
        if {place.kind for place in self._doing(pending, now).values()} != {PEERS}:
            return False
        return any(
            place.kind == CODE
            for other in self._ledger.open.values()
            if other is not pending and other.sent_at <= limit_passed
            for place in self._doing(other, now).values()
        )

    def _failure_of(self, pending: Pending, cause: str, now: float) -> Failure:
        """A late call as the failure of the rank that its other ranks wait for."""
        doing = self._doing(pending, now)
        call = pending.call
        ranks, why = blame(doing)
        if not ranks:  # by what was heard last it waits for rows or for its turn
            ranks = sorted(call.commands.keys() - pending.answered_at.keys())
            why = f"it is {doing[ranks[0]].kind}"
        place = doing[ranks[0]]
        lines = [p.line for p in doing.values()] if place.kind == DONE else []
        also = f" (also {name_ranks(ranks[1:])})" if ranks[1:] else ""
        return Failure(
            "stopped" if place.kind == STOPPED else "deadline",
            ranks[0],
            f"{cause}{also}: {why}",
            *(call.label, call.number, call.lane),
            line=call.line,
            where=place.line or next(filter(None, lines), ""),
        )


def _script_line() -> str:
    """Where the script's thread is."""
    for thread in threading.enumerate():
        if thread.name == "controller" and thread.ident is not None:
            place = place_of(thread.ident, None)
            if place:
                return place.line
            return ""
    return ""
