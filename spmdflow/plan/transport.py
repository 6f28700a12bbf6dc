"""`TraceTransport`: sends nothing, answers at once, writes every order down with its line.

The Transport surface of `runtime.order`. Orders submitted while another is answered follow it,
as with sockets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from spmdflow.plan.answers import Answers
from spmdflow.plan.loop import Path
from spmdflow.plan.record import COMPUTE, Tokens, TracedOrder
from spmdflow.plan.refusal import Refusal
from spmdflow.runtime.inproc import ImmediateTransport
from spmdflow.runtime.order import Order, Pending, Replies, too_early

MOST_CALLS = 100
"""Calls of one step, or before the first; a script that makes more is taken for one that never
ends its step."""


class TraceTransport(ImmediateTransport):
    """Orders of a script that runs on no rank."""

    def __init__(
        self, nodes: Sequence[int], answers: Answers, *, script_file: str, most_calls: int
    ) -> None:
        """nodes: the machine of each rank of the world."""
        super().__init__()
        self.world_size, self._nodes = len(nodes), tuple(nodes)
        self._answers, self._file, self._most_calls = answers, script_file, most_calls
        self.orders: list[TracedOrder] = []
        self.waits: list[tuple[Path, str]] = []
        """(lines, what was waited for) of every look at a result from the script."""
        self.paths: list[Path] = []
        """Of every order of a step: the script's lines that led to it."""
        self.step = 0
        self.is_looking = True
        """Whether results are asked for by the script, not by the end of a step."""
        self.tokens: dict[int, Tokens] = {}
        self._num_calls = 0

    def begin_step(self, number: int) -> None:
        """Calls are counted anew."""
        self.step, self._num_calls = number, 0

    def submit(self, order: Order) -> Pending:
        """Write an order down and answer it; Refusal beyond the calls of a step."""
        path = self.lines()
        line = path[0] if path else None
        if order.lane == COMPUTE:
            self._count(order.label, line)
        if self.step:
            self.paths.append(path)
        traced = TracedOrder(
            len(self.orders),
            order.number,
            order.lane,
            order.label,
            self.step,
            order.phase,
            line,
            dict(order.commands),
        )
        self.orders.append(traced)
        pending = _Watched(order.label, _never_done, self)
        self.post(partial(self._answer, order, pending, traced.place))
        return pending

    def node_of(self, rank: int) -> int:
        """The machine that a rank would run on."""
        return self._nodes[rank]

    def lines(self) -> Path:
        """The script's lines that are running, the innermost first; none outside of it."""
        found = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                found.append(frame.f_lineno)
            frame = frame.f_back
        return tuple(found)

    def _count(self, label: str, line: int | None) -> None:
        self._num_calls += 1
        if self._num_calls <= self._most_calls:
            return
        when = f"in step {self.step}" if self.step else "before the first step"
        what = "the step to end" if self.step else "flow.steps(...) to begin"
        raise Refusal(
            f"script line {line}: got call {self._num_calls} ({label}) {when}, expected {what} "
            f"within {self._most_calls} calls; a loop that waits for data may never see it here: "
            f"declare what it waits for with flow.assume(name=value), or raise --calls"
        )

    def _answer(self, order: Order, pending: Pending, place: int) -> None:
        replies = self._answers.to(order.label, order.number, order.commands)
        tokens = self._answers.tokens(order.number, order.commands)
        if tokens is not None:
            self.tokens[place] = tokens
        if order.on_done:
            order.on_done(replies)
        pending.resolve(replies)


class _Watched(Pending):
    """Replies that are there; looking at them is written down."""

    def __init__(
        self, label: str, wait: Callable[[Pending], None], transport: TraceTransport
    ) -> None:
        super().__init__(label, wait)
        self._transport = transport

    def result(self) -> Replies:
        if self._transport.is_looking and self._transport.step:
            path = self._transport.lines()
            if path:
                self._transport.waits.append((path, self.label))
        return super().result()


def _never_done(pending: Pending) -> None:
    """Waiting cannot help where everything is answered at once."""
    raise too_early(pending)
