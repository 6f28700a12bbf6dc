"""Turns a method call of the script into numbered commands, and its answer into a lazy batch.

Script thread only. A call is checked here, completely, before anything is sent: these are the
only errors a script may catch. Then each rank gets its command, missing rows are planned, and
the answer is returned at once (DESIGN: the life of a call).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from spmdflow.controller.assignment import Assignment, by_share
from spmdflow.controller.batch import Batch, ColumnRef
from spmdflow.controller.call import Target, assign_rows, commands_on_rows, frame_of, ids_at
from spmdflow.controller.check import (
    check_arguments,
    check_extends,
    check_takes_list,
    columns_read,
)
from spmdflow.controller.draws import Draws
from spmdflow.controller.fetch import fetch_column
from spmdflow.controller.frame import Frame, SourceFrame, facts_of, places_of
from spmdflow.controller.inputs import by_frame, home_frame, positions_held, source_lengths
from spmdflow.controller.join import joined
from spmdflow.controller.result import CallRecord, Result
from spmdflow.controller.transfers import Transfers
from spmdflow.data.row_id import Ids, RowIds
from spmdflow.errors import MessageError, ProtocolError
from spmdflow.runtime.order import Order, Pending, Transport
from spmdflow.runtime.script_line import script_line
from spmdflow.tracking.metric import merge
from spmdflow.transfer.protocol import protocol
from spmdflow.transfer.register import MethodSpec, method_spec
from spmdflow.transfer.row_maths import row_maths_spec


@dataclass(frozen=True)
class CallSettings:
    """Limits and the seed that calls need."""

    seed: int
    call_seconds: float
    ranks: tuple[int, ...]
    """Every rank of the run, the controller's first."""


class Caller:
    """Numbers calls, keeps the rows' accounts, collects what calls report."""

    def __init__(self, transport: Transport, transfers: Transfers, settings: CallSettings) -> None:
        self.transport, self.transfers, self._settings = transport, transfers, settings
        self.ranks = settings.ranks
        self.step = 0
        self.phase = "train"
        self.scored: Batch | None = None
        """The last rows with a prompt, a response and a score as text; sample tables show them."""
        self.records: list[CallRecord] = []
        self.fetched_bytes: dict[str, int] = {}
        self.row_ids = RowIds()
        self._draws = Draws()
        self._last_number = 0
        self._freed: deque[int] = deque()
        self._unsent: dict[int, list[int]] = {}

    # Numbers

    def next_number(self) -> int:
        """The number of the next call or frame."""
        self._last_number += 1
        return self._last_number

    def free(self, frame: int) -> None:
        """A frame lost its last reference; ranks hear of it with the next command."""
        self._freed.append(frame)

    # Calls

    def submit(
        self,
        label: str,
        commands: Mapping[int, dict[str, Any]],
        on_done: Callable[[dict[int, dict[str, Any]]], None] | None = None,
        *,
        answering: tuple[int, ...] = (),
        seconds: float | None = None,
        number: int | None = None,
    ) -> Pending:
        """Send one numbered command to each rank of `commands`; metrics of answering count.

        number: of the frame that the command makes, if it makes one.
        """
        number = number or self.next_number()
        return self._submit(number, label, commands, answering, on_done, seconds)

    def invoke(
        self, target: Target, method: str, batch: Batch | None, arguments: Mapping[str, Any]
    ) -> Batch | Result:
        """Call a registered method of a worker group (paper section 4.1)."""
        spec = method_spec(target.worker_class, method)
        label = f"{target.name}.{method}"
        function = getattr(target.worker_class, method)
        check_arguments(label, function, [None] if batch is None else [None, batch], arguments)
        if spec.check is not None:
            spec.check(label, target.settings, arguments)
        head = {
            "operation": "call",
            "group": target.name,
            "method": method,
            "step": self.step,
            "arguments": dict(arguments),
        }
        if batch is None:
            ranks = tuple(protocol(spec.transfer_mode).collect(target.layout).ranks)
            commands = {rank: dict(head) for rank in target.layout.ranks}
            pending = self._submit(self.next_number(), label, commands, ranks)
            return Result(label, pending, ranks)
        names = columns_read(spec, batch, label)
        check_extends(spec, batch, label)
        assignment = assign_rows(self, target, spec, batch, names, seed=self._settings.seed)
        return self._run_on_rows(label, head, batch, names, assignment, spec)

    def invoke_each(
        self, target: Target, method: str, items: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Result:
        """Call a method with the i-th of a list on the i-th rank (ALL_TO_ALL)."""
        spec = method_spec(target.worker_class, method)
        label = f"{target.name}.{method}"
        function = getattr(target.worker_class, method)
        check_takes_list(label, spec, items)
        check_arguments(label, function, [None, None], arguments)
        rules = protocol(spec.transfer_mode)
        given = rules.distribute(target.layout, len(items))
        if any(len(positions) != 1 for positions in given.values()):
            raise ProtocolError(
                f"{label}: got a list of {len(items)} under {spec.transfer_mode}, expected a mode "
                f"that gives each rank one item; register it with transfer_mode='ALL_TO_ALL'"
            )
        head = {"operation": "call", "group": target.name, "method": method, "step": self.step}
        commands = {
            rank: {**head, "arguments": dict(arguments), "item": items[positions[0]]}
            for rank, positions in given.items()
        }
        ranks = tuple(rules.collect(target.layout).ranks)
        return Result(label, self._submit(self.next_number(), label, commands, ranks), ranks)

    def _run_on_rows(
        self,
        label: str,
        head: Mapping[str, Any],
        batch: Batch,
        names: Sequence[str],
        assignment: Assignment,
        spec: MethodSpec,
        groups: np.ndarray | None = None,
    ) -> Batch | Result:
        number = self.next_number()
        per_row = {}
        if spec.draws:
            greedy = bool(head["arguments"].get("greedy"))
            per_row["generation"] = self._draws.take(
                self.step, self.phase, batch.ids, greedy=greedy
            )
        commands, held = commands_on_rows(head, batch, names, assignment, spec, per_row, groups)
        frame = None
        if spec.writes:
            frame = frame_of(number, label, held, assignment, spec.writes, self.free)
        on_done = _keep_until_done(batch, frame, self.transfers)
        self._need(batch, names, assignment.given)  # first: the rows are under way before the call
        pending = self._submit(number, label, commands, assignment.answering, on_done)
        if frame is None:
            return Result(label, pending, assignment.answering)
        columns = {name: ColumnRef(frame, batch.ids, name) for name in spec.writes}
        if spec.extends:
            columns = {name: batch.column(name) for name in batch.columns} | columns
        made = Batch(self, batch.ids, batch.parents, columns)
        if "response_text" in spec.writes and "prompt_text" in batch.columns:
            self.scored = made | batch.drop(*set(spec.writes) & set(batch.columns))
        return made

    def map(self, batch: Batch, function: Callable[..., Any], settings: Mapping[str, Any]) -> Batch:
        """Row maths on the ranks that hold most of the columns that it reads."""
        spec = row_maths_spec(function)
        label = f"map.{function.__name__}"
        given_later = dict.fromkeys(("reduce", "report", *(["groups"] if spec.groups else [])))
        check_arguments(label, partial(function, **given_later), [batch], settings)
        reads = spec.reads_with(settings)
        optional = tuple(name for name in spec.optional if name not in reads)
        marked = MethodSpec("rows", reads, optional, spec.writes, False, False)
        names = columns_read(marked, batch, label)
        given = positions_held(batch, home_frame(batch, names, label))
        head = {
            "operation": "map",
            "function": f"{function.__module__}:{function.__qualname__}",
            "step": self.step,
            "arguments": dict(settings),
            "ranks": list(given),
        }
        assignment = Assignment(given, given, tuple(given))
        groups = batch.group_numbers() if spec.groups else None
        made = self._run_on_rows(label, head, batch, names, assignment, marked, groups)
        assert isinstance(made, Batch)
        return made

    def fetch(
        self, batch: Batch, names: Sequence[str], *, purpose: str
    ) -> dict[str, Tensor | list[str]]:
        """Values of columns on the controller; the bytes are counted under `purpose`."""
        values = {}
        for name in names:
            values[name], size = fetch_column(self, batch.column(name), name)
            self.fetched_bytes[purpose] = self.fetched_bytes.get(purpose, 0) + size
        return values

    def lengths(self, ref: ColumnRef, name: str) -> np.ndarray:
        """(B,) items of each row; waits for the producer."""
        if isinstance(ref.frame, SourceFrame):
            return source_lengths(ref.frame, ref.ids, ref.stored)
        self.wait_for(ref.frame)
        return ref.frame.facts[ref.stored].lengths_of(ref.ids)

    def metrics_of(self, frames: Iterable[Frame]) -> Mapping[str, float]:
        """What the calls that made the frames reported, merged; waits for them."""
        metrics = []
        for frame in frames:
            self.wait_for(frame)
            metrics += frame.metrics
        return merge(metrics)

    # Rows

    def join(self, columns: Mapping[str, Sequence[ColumnRef]], ids: Ids) -> dict[str, ColumnRef]:
        """Columns of rows that several calls made, one after the other, under row ids `ids`."""
        return joined(self, columns, ids)

    def source_batch(
        self,
        source: str,
        columns: Sequence[str],
        rows: np.ndarray,
        ids: Ids,
        parents: Ids,
        lengths: np.ndarray,
    ) -> Batch:
        """A batch of data rows under the ids given for them; nothing is read yet.

        rows (B,): numbers in the file; lengths (B,): their prompt tokens.
        """
        frame = SourceFrame(
            self.next_number(), source, tuple(columns), ids, rows, self.free, lengths
        )
        return Batch(self, ids, parents, {name: ColumnRef(frame, ids, name) for name in columns})

    def _need(self, batch: Batch, names: Sequence[str], given: Mapping[int, np.ndarray]) -> None:
        for frame, columns, ids in by_frame(batch, names):
            if isinstance(frame, Frame):
                need = by_share(given, partial(ids_at, ids))
                self.transfers.need(frame, list(dict.fromkeys(columns.values())), need)

    def wait_for(self, frame: Frame) -> None:
        """Block until the call that makes the frame has replied."""
        for record in self.records:
            if record.number == frame.number:
                record.pending.result()

    # Sending

    def _submit(
        self,
        number: int,
        label: str,
        commands: Mapping[int, dict[str, Any]],
        answering: tuple[int, ...],
        on_done: Callable[[dict[int, dict[str, Any]]], None] | None = None,
        seconds: float | None = None,
    ) -> Pending:
        self._add_freed(commands)
        limit = self._settings.call_seconds if seconds is None else seconds
        order = Order(
            number,
            "compute",
            label,
            commands,
            limit,
            on_done,
            phase=self.phase,
            line=script_line(),
        )
        try:
            pending = self.transport.submit(order)
        except MessageError:  # nothing was sent, and the script may go on
            for rank, command in commands.items():
                self._unsent.setdefault(rank, []).extend(command.pop("free", []))
            raise
        self.records.append(CallRecord(number, label, self.phase, pending, answering))
        return pending

    def _add_freed(self, commands: Mapping[int, dict[str, Any]]) -> None:
        """Frees ride on this command; ranks that it does not reach keep their list for later."""
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        if freed:
            for rank in self.ranks:
                self._unsent.setdefault(rank, []).extend(freed)
        for rank, command in commands.items():
            if rank in self._unsent:
                command["free"] = self._unsent.pop(rank)


def _keep_until_done(
    batch: Batch, frame: Frame | None, transfers: Transfers
) -> Callable[[dict[int, dict[str, Any]]], None]:
    """What the io thread does when the call is done; until then it keeps the input frames."""

    def done(replies: dict[int, dict[str, Any]], _kept: Batch = batch) -> None:
        if frame is not None:
            frame.facts, frame.places = facts_of(replies, frame.answer), places_of(replies)
            frame.metrics = [replies[rank].get("metrics", {}) for rank in frame.answer]
            transfers.producer_done(frame)

    return done
