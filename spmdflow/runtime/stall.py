"""Calls that take too long: who is where, whom the others wait for, and when that ends the run.

`Stalls` belongs to the controller; every method is called with the io lock held. It knows the
clocks of the calls (Ledger), and from heartbeats what each rank does. After a while
(runtime/pace.py) a call that still runs is printed, and all ranks write their stacks; again each
time twice as long has passed. Where run.call_seconds is auto, a call that takes many times its
median ends the run, and so does a rank that stays stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmdflow.runtime.failure import Failure
from spmdflow.runtime.order import Order
from spmdflow.runtime.pace import (
    BOUNDED,
    HELD_SECONDS,
    LIMIT_FACTOR,
    LIMIT_SECONDS,
    LOOK_SECONDS,
    Key,
    Pace,
)
from spmdflow.runtime.peers import Ledger, Peers, Sent
from spmdflow.runtime.place import (
    CODE,
    DONE,
    PEERS,
    QUEUED,
    ROWS,
    SILENT,
    STOPPED,
    Place,
    blame,
    named,
    place_of,
)
from spmdflow.runtime.rendezvous import SessionSettings

logger = logging.getLogger(__name__)

_LOOK_EVERY = 1.0
_FROZEN_SECONDS = 10.0
"""So long between two looks: this process itself was stopped meanwhile."""
_SILENT_BEATS = 3
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
        self._peers, self._ledger, self._settings = peers, ledger, settings
        self._fail, self._show = fail, show
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

    def heard(self, rank: int, doing: Sequence[Doing] | None, now: float) -> None:
        """A heartbeat."""
        self._beats[rank] = now, doing or ()

    def finished(self, sent: Sent, now: float) -> None:
        """All ranks of a call have answered."""
        self._due.pop(sent.ticket, None)
        self._idle_since, self._idle_due = now, LOOK_SECONDS
        key = _key(sent.order)
        if sent.order.lane == "compute":
            self._ended[key] = now
        self._pace.note(key, sent.took)
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
        for sent in list(self._ledger.open.values()):
            seconds = self._seconds(sent, now)
            first = self._pace.look_after(_key(sent.order))
            due = self._due.get(sent.ticket, first)
            if seconds >= due:
                self._due[sent.ticket] = 2 * seconds
                self._tell(sent, seconds, now, is_first=due == first)
            self._check_limit(sent, seconds, now)
        if not self._ledger.open and now - self._idle_since >= self._idle_due:
            self._idle_due *= 2
            seconds = now - self._idle_since
            logger.warning("no call runs for %.0f s; the script is at %s", seconds, _script_line())

    def culprit_or_none(self, failure: Failure, now: float) -> Failure | None:
        """Whom the ranks of a late call wait for, as the failure of that rank."""
        for sent in self._ledger.open.values():
            if (sent.order.number, sent.order.lane) == (failure.number, failure.lane):
                return self._culprit_or_none(sent, failure.cause, now)
        return None

    def last_line(self, rank: int, order: Order, now: float) -> str:
        """Where rank was in a call by its last heartbeat, and when; empty if it did not tell."""
        doing = self._heard_doing(rank, order)
        return f"{doing[4]} ({now - self._beats[rank][0]:.0f} s before)" if doing else ""

    def state(self, now: float) -> dict[str, Any]:
        """What RUN_DIR/status.json holds: plain data, times in seconds since 1970."""
        wall, medians = time.time(), self._pace.medians()
        calls = [
            self._describe(sent, self._seconds(sent, now), now)
            for sent in self._ledger.open.values()
        ]
        ranks = {
            rank: [process.pid, process.start_ticks, process.node, self._peers.silence(rank, now)]
            for rank, process in self._peers.processes.items()
        }
        slow = [f"rank {rank} in {label}" for (rank, label), t in self._slow.items() if now < t]
        shown = {f"{label} ({phase})": seconds for (label, phase), seconds in medians.items()}
        facts = {"written": wall, "controller": self._settings.controller_rank, "ranks": ranks}
        idle = [] if calls else [[f"no call runs; the script is at {_script_line()}"]]
        kinds = [[*key, medians.get(key), wall - now + at] for key, at in self._ended.items()]
        running = [
            [
                *_key(sent.order),
                self._seconds(sent, now),
                len(sent.order.commands.keys() - sent.replies),
            ]
            for sent in self._ledger.open.values()
            if sent.order.lane == "compute"
        ]
        facts |= {"kinds": kinds, "open": running}
        return facts | {"calls": calls + idle, "slow": slow, "medians": shown}

    # ---- one call

    def _seconds(self, sent: Sent, now: float) -> float:
        """How long all its ranks that have not answered run a call; waiting for rows is none."""
        found = []
        for rank in sent.order.commands.keys() - sent.replies.keys():
            start = self._ledger.start_or_none(rank, sent.ticket)
            if start is None:
                return 0.0
            waited = 0.0
            if doing := self._heard_doing(rank, sent.order):
                waited = doing[2] + (now - self._beats[rank][0] if doing[3] == ROWS else 0.0)
            found.append(now - start - waited)
        return max(0.0, min(found, default=0.0))

    def _heard_doing(self, rank: int, order: Order) -> Doing | None:
        """What rank said that it does in a call."""
        for doing in self._beats[rank][1] if rank in self._beats else ():
            if list(doing[:2]) == [order.number, order.lane]:
                return doing
        return None

    def _doing(self, sent: Sent, now: float) -> dict[int, Place]:
        """What every rank of a call does."""
        return {rank: self._place(rank, sent, now) for rank in sent.order.commands}

    def _place(self, rank: int, sent: Sent, now: float) -> Place:
        if rank in sent.answered:
            took, ago = sent.took[rank].seconds, now - sent.answered[rank]
            return Place(DONE, f"finished after {took:.1f} s, {ago:.0f} s ago")
        doing, process = self._heard_doing(rank, sent.order), self._peers.processes[rank]
        line = doing[4] if doing else ""
        seen, silent = f"; last seen at {line}" if line else "", self._peers.silence(rank, now)
        if process.is_stopped():
            return Place(STOPPED, f"{process.describe()}{seen}", line)
        if silent > _SILENT_BEATS * self._settings.beat_seconds:
            text = f"{process.describe()} and has been silent for {silent:.0f} s{seen}"
            return Place(SILENT, text, line)
        if self._ledger.start_or_none(rank, sent.ticket) is None:
            return Place(QUEUED, "other calls come first")
        if not doing:
            return Place(CODE, "a line not known yet")
        return Place(doing[3], line + (f" ({doing[5]})" if doing[5] else ""), line)

    def _describe(self, sent: Sent, seconds: float, now: float) -> list[str]:
        """A call in words: since when, which rank does what, whom it waits for, who called."""
        order, doing, groups = sent.order, self._doing(sent, now), dict[str, list[int]]()
        for rank, place in sorted(doing.items()):
            groups.setdefault(f"{place.kind}: {place.text}", []).append(rank)
        known, (ranks, why) = self._pace.medians().get(_key(order)), blame(doing)
        usual = "no call before it" if known is None else f"median {known:.2g} s"
        name = f"{order.label} (call {order.number}, {order.lane} lane)"
        parts = [f"{name} runs for {seconds:.0f} s ({usual})"]
        parts += [f"{named(of)} {text}" for text, of in groups.items()]
        parts += [f"the call waits for {named(ranks)}: {why}"] if ranks else []
        return parts + ([f"called at {order.line}"] if order.line else [])

    def _tell(self, sent: Sent, seconds: float, now: float, *, is_first: bool) -> None:
        """One line about a call; the first time all ranks write their stacks."""
        limit = self._limit_or_none(sent.order) or sent.order.seconds
        end = f"the run ends if it takes {limit:.0f} s"
        more = [end, f"stacks: {self._settings.run_dir}/stacks-rank*.txt"] if is_first else []
        logger.warning("%s", "; ".join(self._describe(sent, seconds, now) + more))
        if is_first:
            doing = self._doing(sent, now).items()
            self._show([rank for rank, place in doing if place.kind in (STOPPED, SILENT)])

    def _check_limit(self, sent: Sent, seconds: float, now: float) -> None:
        """End the run if limits are measured ones and that of this call has passed."""
        if self._settings.call_seconds is not None or seconds < HELD_SECONDS:
            return
        limit = self._limit_or_none(sent.order)
        if limit is not None and seconds >= limit:
            medians = f"{LIMIT_FACTOR:g} medians of {self._pace.medians()[_key(sent.order)]:.2g} s"
            cause = f"not finished within {limit:.0f} s ({medians}, at least {LIMIT_SECONDS:g} s)"
        elif any(self._is_held(rank, now) for rank in sent.order.commands.keys() - sent.answered):
            cause = f"not finished after {seconds:.0f} s"
        else:
            return
        if (failure := self._culprit_or_none(sent, cause, now)) is not None:
            self._fail(failure)

    def _limit_or_none(self, order: Order) -> float | None:
        """The measured limit of a call; None: it has none."""
        operations = {plain.get("operation") for plain in order.commands.values()}
        if self._settings.call_seconds is not None or not operations <= set(BOUNDED):
            return None
        return self._pace.limit_or_none(_key(order))

    def _is_held(self, rank: int, now: float) -> bool:
        """Whether rank is stopped since long, not only for a debugger's look."""
        is_silent = self._peers.silence(rank, now) >= HELD_SECONDS
        return is_silent and self._peers.processes[rank].is_stopped()

    def _may_wait_for_others(self, sent: Sent, doing: Mapping[int, Place], now: float) -> bool:
        """Whether all its ranks are in collectives while another call runs: of its ranks, maybe."""
        others = (other for other in self._ledger.open.values() if other is not sent)
        return {place.kind for place in doing.values()} == {PEERS} and any(
            place.kind == CODE for other in others for place in self._doing(other, now).values()
        )

    def _culprit_or_none(self, sent: Sent, cause: str, now: float) -> Failure | None:
        doing, order = self._doing(sent, now), sent.order
        ranks, why = blame(doing)
        if not ranks or self._may_wait_for_others(sent, doing, now):
            return None
        place = doing[ranks[0]]
        lines = [p.line for p in doing.values()] if place.kind == DONE else []
        also = f" (also {named(ranks[1:])})" if ranks[1:] else ""
        return Failure(
            "stopped" if place.kind == STOPPED else "deadline",
            ranks[0],
            f"{cause}{also}: {why}",
            *(order.label, order.number, order.lane),
            line=order.line,
            where=place.line or next(filter(None, lines), ""),
        )


def _key(order: Order) -> Key:
    return order.kind or order.label, order.phase


def _script_line() -> str:
    """Where the script's thread is."""
    for thread in threading.enumerate():
        if thread.name == "controller" and thread.ident is not None:
            place = place_of(thread.ident, None)
            return place.line if place else ""
    return ""
