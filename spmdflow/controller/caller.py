"""Turns a method call of the script into orders, and its answer into a lazy batch.

Script thread only. A call is planned completely before anything is sent (call.py): what is raised
there are the only errors that a script may catch. Then missing rows are set under way, each rank
gets its command, and the answer is returned at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from spmdflow.controller.batch import Batch, ColumnRef
from spmdflow.controller.call import CallPlan, Target, plan_map, plan_method
from spmdflow.controller.check import check_method, check_takes_list
from spmdflow.controller.result import Result, RowResult, SourceRows, source_lengths
from spmdflow.controller.rows import fetch_column, join_columns
from spmdflow.controller.sender import CallSettings, Sender
from spmdflow.controller.transfers import Transfers
from spmdflow.data.row_id import Ids, RowIds
from spmdflow.errors import ProtocolError
from spmdflow.runtime.order import Replies, Transport
from spmdflow.tracking.metric import merge
from spmdflow.transfer.protocol import protocol

_NONE = np.zeros(0, dtype=np.int64)


class Caller:
    """Makes calls, keeps the rows' accounts, and answers what batches ask."""

    def __init__(self, transport: Transport, transfers: Transfers, settings: CallSettings) -> None:
        self.sender, self.transfers = Sender(transport, settings), transfers
        self.scored: Batch | None = None
        """The last rows with a prompt, a response and a score as text; sample tables show them."""
        self.fetched_bytes: dict[str, int] = {}
        self.row_ids = RowIds()
        self._draws = Draws()

    # Calls

    def invoke(
        self, target: Target, method: str, batch: Batch | None, arguments: Mapping[str, Any]
    ) -> Batch | Result:
        """Call a registered method of a worker group (paper section 4.1)."""
        given = [None] if batch is None else [None, batch]
        spec = check_method(target.name, target.worker_class, method, given, arguments)
        if spec.check is not None:
            spec.check(f"{target.name}.{method}", target.settings, arguments)
        head = self._head(target, method, arguments)
        if batch is None:
            commands = {rank: dict(head) for rank in target.layout.ranks}
            return self._ask(target, method, spec.transfer_mode, commands)
        plan = plan_method(target, method, batch, head, seed=self.sender.settings.seed)
        if spec.draws:
            greedy = bool(arguments.get("greedy"))
            sender = self.sender
            drawn = self._draws.take(sender.step, sender.phase, batch.ids, greedy=greedy)
            plan = plan.with_numbers(generation=drawn)
        return self._run(plan, batch)

    def invoke_each(
        self, target: Target, method: str, items: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Result:
        """Call a method with the i-th of a list on the i-th rank (ALL_TO_ALL)."""
        label = f"{target.name}.{method}"
        spec = check_method(target.name, target.worker_class, method, [None, None], arguments)
        check_takes_list(label, spec, items)
        given = protocol(spec.transfer_mode).distribute(target.layout, len(items))
        if any(len(positions) != 1 for positions in given.values()):
            raise ProtocolError(
                f"{label}: got a list of {len(items)} under {spec.transfer_mode}, expected a mode "
                f"that gives each rank one item; register it with transfer_mode='ALL_TO_ALL'"
            )
        head = self._head(target, method, arguments)
        commands = {rank: {**head, "item": items[at[0]]} for rank, at in given.items()}
        return self._ask(target, method, spec.transfer_mode, commands)

    def map(self, batch: Batch, function: Callable[..., Any], settings: Mapping[str, Any]) -> Batch:
        """Run a map function on the ranks that hold most of the columns that it reads."""
        made = self._run(plan_map(batch, function, settings, step=self.sender.step), batch)
        assert isinstance(made, Batch)
        return made

    def _head(self, target: Target, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "operation": "call",
            "group": target.name,
            "method": method,
            "step": self.sender.step,
            "arguments": dict(arguments),
        }

    def _ask(
        self, target: Target, method: str, mode: str, commands: Mapping[int, dict[str, Any]]
    ) -> Result:
        """A call without rows."""
        label, ranks = f"{target.name}.{method}", tuple(protocol(mode).collect(target.layout).ranks)
        return Result(label, self.sender.submit(label, commands, answering=ranks), ranks)

    def _run(self, plan: CallPlan, batch: Batch) -> Batch | Result:
        """Set missing rows under way, send the commands, return what will be there."""
        spec, answering = plan.spec, plan.assignment.answering
        number, held = self.sender.next_number(), plan.held()
        result = plan.result(number, held, self.sender.free) if spec.writes else None
        commands = plan.commands(held)

        def done(replies: Replies, _kept: Batch = batch) -> None:  # keeps the inputs until then
            if result is not None:
                result.learn(replies)
                self.transfers.producer_done(result)

        for given in plan.inputs:  # first: the rows are under way before the call
            if isinstance(given.result, RowResult):
                names = list(dict.fromkeys(given.columns.values()))
                self.transfers.need(given.result, names, plan.needs(given))
        pending = self.sender.submit(plan.label, commands, done, answering=answering, number=number)
        if result is None:
            return Result(plan.label, pending, answering)
        columns = {name: ColumnRef(result, batch.ids, name) for name in spec.writes}
        if spec.extends:
            columns = {name: batch.column(name) for name in batch.columns} | columns
        made = Batch(self, batch.ids, batch.parents, columns)
        if "response_text" in spec.writes and "prompt_text" in batch.columns:
            self.scored = made | batch.drop(*set(spec.writes) & set(batch.columns))
        return made

    # What batches ask

    def take_ids(self, num_rows: int) -> Ids:
        """(num_rows,) new row ids."""
        return self.row_ids.take(num_rows)

    def fetch(
        self, batch: Batch, names: Sequence[str], *, purpose: str
    ) -> dict[str, Tensor | list[str]]:
        """Values of columns on the controller; the bytes are counted under `purpose`."""
        values = {}
        for name in names:
            values[name], size = fetch_column(self.sender, batch.column(name), name)
            self.fetched_bytes[purpose] = self.fetched_bytes.get(purpose, 0) + size
        return values

    def lengths(self, ref: ColumnRef) -> np.ndarray:
        """(B,) items of each row; waits for the producer."""
        if isinstance(ref.result, SourceRows):
            return source_lengths(ref.result, ref.ids, ref.stored)
        self.sender.wait_for(ref.result)
        return ref.result.facts[ref.stored].lengths_of(ref.ids)

    def metrics_of(self, results: Iterable[RowResult]) -> Mapping[str, float]:
        """What the calls that made the results reported, merged; waits for them."""
        metrics = []
        for result in results:
            self.sender.wait_for(result)
            metrics += result.metrics
        return merge(metrics)

    def join(self, columns: Mapping[str, Sequence[ColumnRef]], ids: Ids) -> dict[str, ColumnRef]:
        """Columns of rows that several calls made, one after the other, under row ids `ids`."""
        return join_columns(self.sender, self.transfers, columns, ids)

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
        number, free = self.sender.next_number(), self.sender.free
        result = SourceRows(number, source, tuple(columns), ids, rows, free, lengths)
        return Batch(self, ids, parents, {name: ColumnRef(result, ids, name) for name in columns})


class Draws:
    """Counts by row id how often rows were drawn for, in each phase (train, eval) of a step.

    The numbers depend on the script alone: not on ranks, nor on how rows are cut into calls.
    """

    def __init__(self) -> None:
        self._step = -1
        self._counted: dict[str, tuple[Ids, np.ndarray]] = {}

    def take(self, step: int, phase: str, ids: Ids, *, greedy: bool = False) -> np.ndarray:
        """(B,) int64: earlier draws for rows ids (each once); greedy: this call draws nothing."""
        if step != self._step:
            self._step, self._counted = step, {}
        known, counts = self._counted.get(phase, (_NONE, _NONE))
        everyone = np.union1d(known, ids)
        totals = np.zeros(len(everyone), dtype=np.int64)
        totals[np.searchsorted(everyone, known)] = counts
        places = np.searchsorted(everyone, ids)
        earlier = totals[places]
        if not greedy:
            totals[places] += 1
            self._counted[phase] = everyone, totals
        return earlier
