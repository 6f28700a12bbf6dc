"""A call as a value, and what becomes of it.

| type | what it is |
|---|---|
| `Call` | what the controller asks of some ranks: frozen, and complete when it is made |
| `Command` (worker_api) | one rank's part of a call, as the rank gets it |
| `Pending` | a call that was sent, and its replies when they are there |
| `CallRecord` | a call and all its replies; one line of RUN_DIR/calls.jsonl |

Metrics of a step, the timeline, the plan, the capsule and a replay read records. The `Ledger` has
the calls that lack replies, by rank and lane. A `Transport` carries calls to ranks: `Io` over
sockets, `InprocTransport` (`--inproc`: one process, no threads, no sockets) by running them at
once, so that an exception in an operation reaches the script as it is and `breakpoint()` works
anywhere. Both promise the same order of events: what an `on_done` submits runs when that one
returns, in the order of submission.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Protocol

import numpy as np

from spmdflow.config.parallel import ranges_of
from spmdflow.data.row_id import Ids
from spmdflow.errors import ProtocolError, RunFailed
from spmdflow.failure.duration import CallDuration
from spmdflow.failure.signals import STOP_SIGNALS
from spmdflow.runtime.executor import COMPUTE, FILES, TRANSFER, Operation, find_operation

logger = logging.getLogger(__name__)

Replies = dict[int, dict[str, Any]]
"""Reply payload by rank."""
OnDone = Callable[[Replies], None]
"""Runs in the io thread once all ranks have replied, before `Pending` is done."""


@dataclass(frozen=True)
class RequiredRows:
    """Rows of one result that the ranks of a call must have before they run it."""

    result: int
    """Number of the call that made them."""
    columns: tuple[str, ...]
    """As they are stored there."""
    rows: Mapping[int, Ids]
    """By rank, ascending."""


_LINE_NUMBER = re.compile(r":(\d+)(?::|$)")
_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Call:
    """Commands to some ranks that belong together, and all that follows from them."""

    number: int
    """Numbers count up within a lane; a transfer's is that of its release."""
    lane: str
    """compute, transfer or files."""
    label: str
    """What a user calls it, such as "actor.generate_sequences"."""
    commands: Mapping[int, Mapping[str, Any]]
    """What each rank is told, as plain data; what several ranks share is encoded once."""
    limit_seconds: float | None = None
    """None: that of run.call_seconds=null (failure/limit.py)."""
    step: int = 0
    """Step of the script; 0 before the first."""
    phase: str = "train"
    """train or eval: which metrics its reports belong to."""
    line: str = ""
    """The script's line that made it, as file:line: text."""
    kind: str = ""
    """Calls of one kind take about as long; empty: those with the same label."""
    reply_ranks: tuple[int, ...] = ()
    """Ranks whose answers are the call's answer; their metrics count."""
    required_rows: tuple[RequiredRows, ...] = ()
    rows_after: Mapping[int, Ids] = field(default_factory=dict)
    """The rows of the result that each rank has afterwards."""
    writes: tuple[str, ...] = ()
    """Columns of the result."""
    lineage: frozenset[int] = frozenset()
    """Numbers of the results that it reads, and of those that these were made from."""
    row_ids: Ids = field(default_factory=lambda: _NO_ROWS)
    """(B,): the rows of the batch that it was given."""
    parents: Ids = field(default_factory=lambda: _NO_ROWS)
    """(B,): their groups."""

    @property
    def key(self) -> tuple[str, int]:
        """Names it in a run: its number, among transfers or among all others."""
        return TRANSFER if self.operation == "transfer" else COMPUTE, self.number

    @property
    def duration_key(self) -> tuple[str, str]:
        """Calls with the same key take about as long."""
        return self.kind or self.label, self.phase

    @property
    def line_number(self) -> int | None:
        """The number of the script's line; None: not known."""
        match = _LINE_NUMBER.search(self.line)
        return int(match[1]) if match else None

    @property
    def command(self) -> Mapping[str, Any]:
        """The first rank's command, for what all ranks are told alike."""
        return next(iter(self.commands.values()))

    @property
    def operation(self) -> str:
        """What the ranks do: call, map, join, fetch, transfer, groups, spawn, save, ..."""
        return str(self.command["operation"])

    @property
    def model(self) -> str:
        """The part of the label before the first point."""
        return self.label.partition(".")[0]

    @property
    def method(self) -> str:
        """The part of the label behind the first point; empty for a fetch."""
        return self.label.partition(".")[2]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        return tuple(sorted(self.commands))


def with_freed(call: Call, freed: Mapping[int, Sequence[int]]) -> Call:
    """Return the call with an entry "free" in its commands: the results that each rank must forget.

    Ranks that shared one command still do if they forget the same results. Without freed results,
    returns the call itself.
    """
    if not freed:
        return call
    commands: dict[int, Mapping[str, Any]] = {}
    shared: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}
    for rank, command in call.commands.items():
        numbers = tuple(freed.get(rank, ()))
        key = (id(command), numbers)
        if key not in shared:
            shared[key] = {**command, "free": list(numbers)} if numbers else dict(command)
        commands[rank] = shared[key]
    return replace(call, commands=commands)


class Pending:
    """A call that was sent, and its replies, when they are there."""

    def __init__(
        self, call: Call, wait: Callable[[Pending], None], on_done: OnDone | None = None
    ) -> None:
        """wait(pending) returns when pending is done, or raises RunFailed."""
        self.call = call
        self._on_done = on_done
        self.ticket = 0
        """The transport's own name of the call."""
        self.sent_at = 0.0
        """time.monotonic()."""
        self.replies: Replies = {}
        """Those that have come."""
        self.durations: dict[int, CallDuration] = {}
        """How long each rank says that it took."""
        self.answered_at: dict[int, float] = {}
        """time.monotonic() of each reply."""
        self._wait = wait
        self._failure: RunFailed | None = None
        self._latch = threading.Lock()
        self._latch.acquire()

    @classmethod
    def of_no_call(cls, label: str, wait: Callable[[Pending], None]) -> Pending:
        """Something else that is waited for, such as the start of all ranks."""
        return cls(Call(0, COMPUTE, label, {}), wait)

    @property
    def label(self) -> str:
        """The label of the call."""
        return self.call.label

    @property
    def done(self) -> bool:
        """Whether `result` returns (or raises) at once."""
        return not self._latch.locked()

    def result(self) -> Replies:
        """Wait for the replies of all ranks and return them: rank -> reply payload.

        Raises the RunFailed that was given to `fail`, or the one that `wait` (of the constructor)
        raises when the session is over. There is no timeout of its own: the time limits of calls
        bound the wait.
        """
        if self._latch.locked():
            self._wait(self)
        if self._failure is not None:
            raise self._failure
        return self.replies

    def record(self) -> CallRecord:
        """The call and its replies; waits for them."""
        return CallRecord(self.call, self.result())

    def run_on_done(self) -> None:
        """Call on_done(replies), at most once; do nothing without an `on_done`.

        Drops the reference to `on_done` first, because it keeps rows alive. Exceptions of `on_done`
        are passed on.
        """
        on_done = self._on_done
        self._on_done = None
        if on_done is not None:
            on_done(self.replies)

    def sleep(self, seconds: float) -> None:
        """Wait until done, at most seconds, while another thread receives."""
        if self._latch.acquire(timeout=seconds):
            self._latch.release()

    def resolve(self, replies: Replies) -> None:
        """Hand over the replies (io thread, once; too late after `fail`)."""
        if self._latch.locked():
            self.replies = replies
            self._latch.release()

    def fail(self, failure: RunFailed) -> None:
        """Let `result` raise, if it would have to wait (io thread)."""
        if self._latch.locked():
            self._failure = failure
            self._latch.release()


@dataclass(frozen=True)
class CallRecord:
    """A call and what its ranks replied. It keeps no rows alive."""

    call: Call
    replies: Mapping[int, Mapping[str, Any]]
    """Reply payload by rank."""

    @property
    def answers(self) -> list[Mapping[str, Any]]:
        """The replies of the ranks whose answers count."""
        return [self.replies[rank] for rank in self.call.reply_ranks]

    def to_line(self) -> dict[str, Any]:
        """Return the record as a dict for one line of RUN_DIR/calls.jsonl.

        ranks: the first and the last rank of each range, [[0, 3], [6, 7]]. start: of the first rank
        that began, end: of the last rank that ended, in seconds since the epoch by that rank's own
        clock; longest_seconds: of the slowest rank. These three are missing if no reply has a span.
        received_bytes: sum over all ranks; missing if 0. device_bytes: the highest peak of a rank's
        device while it ran this call; missing if no rank knows it.
        """
        call = self.call
        spans = [reply["span"] for reply in self.replies.values() if "span" in reply]
        line: dict[str, Any] = {
            "step": call.step,
            "phase": call.phase,
            "number": call.number,
            "lane": call.lane,
            "label": call.label,
            "operation": call.operation,
            "line": call.line,
            "ranks": ranges_of(call.ranks),
            "rows": len(call.row_ids),
            "reads": [[rows.result, list(rows.columns)] for rows in call.required_rows],
            "writes": list(call.writes),
        }
        if spans:
            line["start"] = min(start for start, _ in spans)
            line["end"] = max(end for _, end in spans)
            line["longest_seconds"] = max(end - start for start, end in spans)
        received = 0
        for reply in self.replies.values():
            received += sum(reply.get("received", {}).values())
        if received:
            line["received_bytes"] = received
        peaks = [
            reply["device_bytes"] for reply in self.replies.values() if "device_bytes" in reply
        ]
        if peaks:
            line["device_bytes"] = max(peaks)
        return line


class Ledger:
    """Calls that lack replies, and what each lane of each rank owes of them, oldest first.

    Each lane of a rank runs its commands in the order in which they were sent, so the oldest
    unanswered one is the one that runs. It began when it was sent, or when the one before it was
    answered. For the io thread alone.
    """

    def __init__(self) -> None:
        self.open: dict[int, Pending] = {}
        """By ticket."""
        self._owed: defaultdict[tuple[int, str], deque[int]] = defaultdict(deque)
        self._free_since: dict[tuple[int, str], float] = {}
        """When a lane of a rank gave its last answer."""
        self._last: dict[int, tuple[str, int]] = {}
        """Label and number of what a rank answered last."""

    def record_sent(self, ticket: int, pending: Pending, *, now: float) -> None:
        """Record that a call was sent at `now`: add it to `open` and to each of its ranks' queues.

        Sets pending.ticket and pending.sent_at. `open` maps a ticket to its call, and there is one
        queue per rank and lane (compute or transfer).
        """
        pending.ticket = ticket
        pending.sent_at = now
        self.open[ticket] = pending
        for rank in pending.call.commands:
            self._owed[rank, pending.call.lane].append(ticket)

    def answer(
        self,
        rank: int,
        ticket: int,
        payload: dict[str, object],
        *,
        now: float,
        duration: CallDuration | None = None,
    ) -> Pending | None:
        """Record a rank's reply; return the call if it was the last missing reply, otherwise None.

        Stores payload, duration (default: 0 s) and arrival time in the `Pending`. A call whose
        ranks have all replied is removed from `open`. AssertionError if the ticket is not the
        oldest unanswered one in this lane of this rank.
        """
        pending = self.open[ticket]
        call = pending.call
        lane = (rank, call.lane)
        assert self._owed[lane] and self._owed[lane][0] == ticket, (lane, ticket, call.label)
        self._owed[lane].popleft()
        self._free_since[lane] = now
        pending.replies[rank] = payload
        pending.durations[rank] = duration or CallDuration(0.0)
        pending.answered_at[rank] = now
        self._last[rank] = call.label, call.number
        if len(pending.replies) < len(call.commands):
            return None
        return self.open.pop(ticket)

    def last(self, rank: int) -> str:
        """What rank did before, in words; empty if nothing."""
        if rank in self._last:
            return "after {} (call {})".format(*self._last[rank])
        return ""

    def running(self, rank: int) -> list[Call]:
        """Return the oldest unanswered call of each lane of a rank (compute, transfer, files).

        Lanes run their calls in order, so these calls are running, unless their commands are still
        on their way. Empty if the rank is idle.
        """
        calls = []
        for lane in (COMPUTE, TRANSFER, FILES):
            tickets = self._owed.get((rank, lane))
            if tickets:
                calls.append(self.open[tickets[0]].call)
        return calls

    def start_or_none(self, rank: int, ticket: int) -> float | None:
        """Return the time.monotonic() at which a rank began an open call; None if it is queued.

        A call begins when it is sent, or when its lane of that rank answers the call before it,
        whichever is later. Also None if the rank has already answered it.
        """
        pending = self.open[ticket]
        lane = rank, pending.call.lane
        tickets = self._owed.get(lane)
        if not tickets or tickets[0] != ticket:
            return None
        return max(pending.sent_at, self._free_since.get(lane, 0.0))

    def shift(self, seconds: float) -> None:
        """Add `seconds`, during which this process was stopped, to all start times of open calls.

        So the stop does not count as run time of the calls. Changes sent_at of every open call in
        place.
        """
        for pending in self.open.values():
            pending.sent_at += seconds
        for lane in self._free_since:
            self._free_since[lane] += seconds

    def owing(self) -> set[int]:
        """Return the ranks that have not answered at least one call that was sent to them."""
        ranks = set()
        for (rank, _), tickets in self._owed.items():
            if tickets:
                ranks.add(rank)
        return ranks


class Transport(Protocol):
    """What carries calls to ranks: sockets (`Io`), or nothing at all (`InprocTransport`).

    Posted functions and `on_done` run "in the io thread": one at a time, in order. A script that
    submits does that work itself, under the io thread's lock, which saves a thread switch.
    """

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def stop_requested(self) -> bool:
        """Whether the run was asked to save and end (by a signal); read it between steps."""

    def on_stop(self, say: Callable[[], str]) -> None:
        """Call say() when the run is asked to save and end, and log what it returns."""

    def submit(self, call: Call, on_done: OnDone | None = None) -> Pending:
        """Send a call; MessageError, before anything is sent, if it is not plain data."""

    def post(self, function: Callable[[], None]) -> None:
        """Run function in the io thread, after everything submitted before."""

    def node_of(self, rank: int) -> int:
        """The node that a rank runs on, as a number."""

    def close(self) -> None:
        """Wait for all calls, then end every rank's lanes."""


def names_in(part: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """(name that the call sees, stored name) of every column of a part of the inputs."""
    return part.get("seen") or [(name, name) for name in part["columns"]]


def refuse_to_wait(pending: Pending) -> None:
    """Raise the ProtocolError of a wait that the waiting code itself prevents from ending."""
    raise ProtocolError(
        f"{pending.label}: its result was asked for inside of on_done or a posted function; "
        f"expected that only in the script; read the replies that on_done is given"
    )


class ImmediateTransport:
    """What transports without threads share: what is posted runs at once, and in order."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._is_running = False
        self.stop_requested = False
        """Set by `stop_on_signals`; the script reads it between steps."""
        self.say_stop: Callable[[], str] = lambda: "saving and stopping"

    def post(self, function: Callable[[], None]) -> None:
        """Run function now, or at the end of the queue if a posted function is running.

        The outermost call of `post` runs the whole queue before it returns. An exception leaves
        that call and drops the functions that are still queued.
        """
        self._queue.append(function)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._queue:
                self._queue.popleft()()
        finally:
            self._is_running = False
            self._queue.clear()

    def on_stop(self, say: Callable[[], str]) -> None:
        """Call say() when the run is asked to save and end, and log what it returns."""
        self.say_stop = say

    def close(self) -> None:
        """Nothing is left to end."""


class InprocTransport(ImmediateTransport):
    """Runs the commands of rank 0 in the caller."""

    world_size = 1

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        super().__init__()
        self._operations = operations

    def submit(self, call: Call, on_done: OnDone | None = None) -> Pending:
        """Run a call; what it raises is raised here."""
        pending = Pending(call, refuse_to_wait, on_done)
        self.post(partial(self._run, pending))
        return pending

    def node_of(self, rank: int) -> int:
        """All on this node."""
        return 0

    def _run(self, pending: Pending) -> None:
        """Run a call's operation for rank 0 in this thread, then `on_done`, then mark it as done.

        An exception of the operation or of `on_done` is passed on to the caller. ProtocolError for
        an unknown operation; AssertionError for a command to another rank than 0.
        """
        call = pending.call
        replies = {}
        for rank, payload in call.commands.items():
            assert rank == 0, (call.label, rank)
            operation = find_operation(self._operations, call.label, payload)
            replies[rank] = operation(dict(payload), call.number)
        pending.replies = replies
        pending.run_on_done()
        pending.resolve(replies)


@contextlib.contextmanager
def stop_on_signals(transport: InprocTransport) -> Iterator[None]:
    """Let SIGTERM, SIGINT and SIGHUP set transport.stop_requested while the context is active.

    The script reads that flag after each step, then saves and ends, as under torchrun. The first
    Ctrl-C restores Python's handler, so that the second one raises KeyboardInterrupt. Signals that
    the process ignores stay ignored. At the end the previous handlers are restored. Does nothing
    outside the main thread, because only the main thread can set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        """Signal handler: set transport.stop_requested, and log the signal and what happens next.

        For Ctrl-C it also restores Python's own handler, so that the next Ctrl-C raises
        KeyboardInterrupt.
        """
        again = ""
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            again = "; press Ctrl-C again to stop at once"
        logger.warning(
            "asked to end by %s: %s%s", STOP_SIGNALS[number], transport.say_stop(), again
        )
        transport.stop_requested = True

    before: dict[int, Any] = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
