"""`TraceTransport` sends nothing, answers at once, writes every order down with its line.

The Transport surface of `runtime.order`. Orders submitted while another is answered follow it,
as with sockets. `reads_of` finds the loops around the lines of the script that wait for data.
"""

from __future__ import annotations

import ast
import pathlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from types import FrameType, ModuleType

from spmdflow.errors import PlanError
from spmdflow.plan.answers import Answers
from spmdflow.plan.record import COMPUTE, BytesByEdge, Read, Tokens, TracedOrder
from spmdflow.runtime.order import (
    ImmediateTransport,
    Order,
    Pending,
    Replies,
    refuse_to_wait,
)

Path = tuple[int, ...]
"""Lines of the script that were running, the innermost first: a helper's, then its caller's."""

MOST_CALLS = 100
"""Calls of one step, or before the first; a script that makes more is taken for one that never
ends its step."""


class TraceTransport(ImmediateTransport):
    """Orders of a script that runs on no rank."""

    def __init__(
        self, nodes: Sequence[int], answers: Answers, script_file: str, *, most_calls: int
    ) -> None:
        """nodes: the node of each rank of the world."""
        super().__init__()
        self.world_size, self._nodes, self.answers = len(nodes), tuple(nodes), answers
        self._file, self._most_calls, self._num_calls = script_file, most_calls, 0
        self.orders: list[TracedOrder] = []
        self.waits: list[tuple[Path, str]] = []
        """(lines, what was waited for) of every look at a result from the script."""
        self.paths: list[Path] = []
        """Of every order of a step: the script's lines that led to it."""
        self.steps: list[int] = []
        """Numbers of the steps that began."""
        self.is_looking = True
        """Whether results are asked for by the script, not by the end of a step."""
        self.tokens: dict[int, Tokens] = {}
        self.edges: dict[int, BytesByEdge] = {}
        """Row bytes by step and (source, destination), as the controller's own account has them."""

    # Steps: what the traced flow tells

    def begin_step(self, number: int) -> None:
        """Calls are counted anew."""
        self.steps.append(number)
        self._num_calls = 0

    def end_step(self, number: int, planned: Counter[tuple[int, int]]) -> None:
        """A step is over. planned: row bytes by edge since the first one."""
        self.edges[number] = dict(planned - sum(map(Counter, self.edges.values()), Counter()))

    @property
    def step(self) -> int:
        """Number of the step that runs; 0 before the first."""
        return self.steps[-1] if self.steps else 0

    def use(self, *names: str) -> None:
        """The script reads these metrics."""
        if self.is_looking:
            self.answers.examples.use(names)

    # The transport's surface

    def submit(self, order: Order) -> Pending:
        """Write an order down and answer it; PlanError beyond the calls of a step."""
        path = self.lines()
        line = path[0] if path else None
        if order.lane == COMPUTE:
            self._count(order.label, line)
        if self.step:
            self.paths.append(path)
        place, facts = len(self.orders), (order.number, order.lane, order.label, self.step)
        commands = dict(order.commands)
        self.orders.append(TracedOrder(place, *facts, order.phase, line, commands))
        pending = _Watched(order.label, self)
        self.post(partial(self._answer, order, pending, place))
        return pending

    def node_of(self, rank: int) -> int:
        """The node that a rank would run on."""
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
        raise PlanError(
            f"script line {line}: got call {self._num_calls} ({label}) {when}, expected {what} "
            f"within {self._most_calls} calls; a loop that waits for data may never see it here: "
            f"declare what it waits for with flow.assume(name=value), or raise --calls"
        )

    def _answer(self, order: Order, pending: Pending, place: int) -> None:
        replies = self.answers.to(order)
        tokens = self.answers.rows.tokens(order.number, order.commands)
        if tokens is not None:
            self.tokens[place] = tokens
        if order.on_done and order.lane == COMPUTE:  # of a transfer, it counts bytes that moved
            order.on_done(replies)
        pending.resolve(replies)


class _Watched(Pending):
    """Replies that are there; looking at them is written down."""

    def __init__(self, label: str, transport: TraceTransport) -> None:
        super().__init__(label, refuse_to_wait)
        self._transport = transport

    def result(self) -> Replies:
        if self._transport.is_looking and self._transport.step:
            path = self._transport.lines()
            if path:
                self._transport.waits.append((path, self.label))
        return super().result()


_LOOPS = (ast.While, ast.For, ast.AsyncFor)


def reads_of(
    script: ModuleType, waits: Sequence[tuple[Path, str]], orders: Iterable[Path]
) -> list[Read]:
    """Every line that waited, once, with what it waited for; then loops that made calls.

    orders: the lines that led to each order of a step.
    """
    inner = _inner_loops(pathlib.Path(str(script.__file__)).read_text(encoding="utf-8"))
    found: dict[int, list[str]] = {}
    looping = {path[0] for path, _ in waits if any(_encloses(loop, path) for loop in inner)}
    for (line, *_), what in waits:
        if what not in found.setdefault(line, []):
            found[line].append(what)
    reads = [Read(line, ", ".join(what), line in looping) for line, what in sorted(found.items())]
    calls = set(orders)
    for loop in inner:
        if loop.start not in found and any(_encloses(loop, path) for path in calls):
            waiting = any(_encloses(loop, path) for path, _ in waits)
            what = f"loop over lines {loop.start}-{loop.stop - 1}"
            reads.append(Read(loop.start, what, True, waits=waiting))
    return reads


def _encloses(loop: range, path: Path) -> bool:
    return any(line in loop for line in path)


def _inner_loops(text: str) -> list[range]:
    """Lines of all loops but those over the run's steps, and those that such a loop is in."""
    loops = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _LOOPS)]
    return [
        range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
        for loop in loops
        if not any(_is_over_steps(node) for node in ast.walk(loop))
    ]


def _is_over_steps(node: ast.AST) -> bool:
    """`for step in flow.steps(...)`, also inside of enumerate and the like."""
    return isinstance(node, ast.For | ast.AsyncFor) and any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr == "steps"
        for part in ast.walk(node.iter)
    )
