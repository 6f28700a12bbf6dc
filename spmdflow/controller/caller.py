"""Turns calls of the script into numbered commands, and their answers into lazy batches.

Script thread only. A call is planned completely before anything is sent (call.py). Then transfers
of missing rows start, each rank gets its command, and a lazy result is returned at once. `fetch`
is the one place where rows pass through the controller.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmdflow.config.schema import RunConfig
from spmdflow.controller.assignment import Target
from spmdflow.controller.batch import Batch
from spmdflow.controller.call import CallPlan, columns_read, plan_map, plan_method
from spmdflow.controller.draw_count import DrawCounts
from spmdflow.controller.extending import carried_columns
from spmdflow.controller.old_log_probs import RECOMPUTE, ROLLOUT, OldLogProbs
from spmdflow.controller.result import (
    CallRecord,
    ColumnRef,
    ReportedMetrics,
    Result,
    RowResult,
    SourceRows,
    Transfers,
    cut_rows,
    input_of,
    nothing,
)
from spmdflow.data.column import Column, join, read_message
from spmdflow.data.row_id import Ids, RowIds
from spmdflow.errors import ColumnError, MessageError
from spmdflow.failure.user_code import script_line
from spmdflow.runtime.order import Order, Pending, Replies, Transport
from spmdflow.tracking.metric import merge
from spmdflow.worker_api.register import method_spec

PIECE_BYTES = 32 << 20
"""Rows that the controller fetches travel in pieces of at most this size."""
_SOURCE_ROW_BYTES = 64 << 10
"""What a row of a data file is taken to have, as the controller does not know it."""
_ROW_HEAD_BYTES = 16
"""Of a row that is fetched: its id in the command, its length in the reply."""


class Caller:
    """Makes calls, keeps track of which rank has which rows, and serves batches."""

    def __init__(self, transport: Transport, run: RunConfig, ranks: tuple[int, ...]) -> None:
        """run: its seed and limits. ranks: every rank of the run, the controller's first."""
        self.transport = transport
        self.ranks = ranks
        self._seed = run.seed
        self._seconds = run.call_seconds
        self.transfers = Transfers(transport, seconds=run.transfer_seconds)
        self.step = self.last_step = 0
        self.total_steps = 0
        """Steps that the script takes; more than last_step where only some are replayed."""
        self.phase = "train"
        """train or eval: which metrics the reports of calls belong to."""
        self.records: list[CallRecord] = []
        """Orders of the compute lane of the running step, in the order of the script."""
        self.scored: dict[str, Batch] = {}
        """The step's last rows with texts and a score, by phase; sample tables show them."""
        self.learnt: Batch | None = None
        """The last rows that an update of the running step was given."""
        self.num_updates: Counter[str] = Counter()
        """Updates of this launch by model."""
        self.busy: AbstractSet[int] = frozenset()
        """Ranks whose compute lane draws for rows of later steps: other calls would wait."""
        self.captured: list[tuple[CallRecord, RowResult | None, object]] | None = None
        """Orders of a step that is kept (capsule.py), what they make and their inputs."""
        self.is_skipped: Callable[[Batch], bool] | None = None
        """Asked before an update: whether to leave it out (guarding.py)."""
        self.fetched_bytes: Counter[str] = Counter()
        self.row_ids = RowIds()
        self.old_log_probs = OldLogProbs()
        self._draws = DrawCounts()
        self._last_number = 0
        self._freed: deque[int] = deque()
        self._unsent: dict[int, list[int]] = {}

    def nodes(self) -> list[int]:
        """Node of every rank, by global rank; -1: not a rank of the run."""
        nodes = [-1] * (max(self.ranks) + 1)
        for rank in self.ranks:
            nodes[rank] = self.transport.node_of(rank)
        return nodes

    # Calls

    def invoke(
        self,
        target: Target,
        method: str,
        given: Batch | list[Any] | None,
        arguments: Mapping[str, Any],
    ) -> Batch | Result:
        """Call a registered method of a worker group (paper section 4.1).

        `compute_log_prob` need not run: see old_log_probs.py.
        """
        spec = method_spec(target.worker_class, method)
        if not isinstance(given, Batch):
            return self._run(self._plan(target, method, given, arguments), None)
        made: Batch | Result | None = None
        if spec.instead and spec.writes:
            made = self._without_running(target, method, given)
        if made is None and spec.minibatches and not spec.writes:
            made = self._update(target, method, given, arguments)
        if made is None:
            made = self._run(self._plan(target, method, given, arguments), given)
        following = spec.followed_by(target.settings) if spec.followed_by else None
        if following is not None and isinstance(made, Batch):
            function, settings = following
            made |= self.map(given | made, function, settings)
        return made

    def _without_running(self, target: Target, method: str, batch: Batch) -> Batch | None:
        """The answer of `compute_log_prob` where nothing has to be computed; None: run it."""
        spec = method_spec(target.worker_class, method)
        columns_read(spec, batch, f"{target.name}.{method}")  # as where it runs
        source = self.old_log_probs.source(target, spec, batch)
        if source == RECOMPUTE:
            return None
        columns = {}
        if source == ROLLOUT:
            for name, other in spec.instead.items():
                columns[name] = batch.column(other)
        else:
            self.old_log_probs.omit(target, batch, self.num_updates[target.name])
        return Batch(self, batch.ids, batch.parents, columns)

    def _update(
        self, target: Target, method: str, batch: Batch, arguments: Mapping[str, Any]
    ) -> Batch | Result:
        """Let a model learn from the rows, unless a guard skips them."""
        if self.is_skipped is not None and self.is_skipped(batch):
            return nothing(f"{target.name}.{method}")
        spec = method_spec(target.worker_class, method)
        num_updates = self.num_updates[target.name]
        instead = self.old_log_probs.replacements(target, spec, batch, num_updates)
        plan = self._plan(target, method, batch, arguments, instead=instead)
        self.learnt = batch
        self.num_updates[target.name] += 1
        return self._run(plan, batch)

    def _plan(
        self,
        target: Target,
        method: str,
        given: Batch | list[Any] | None,
        arguments: Mapping[str, Any],
        *,
        instead: Mapping[str, str] | None = None,
    ) -> CallPlan:
        """The call as commands by rank; an update also hears how many steps the run has.

        instead: column -> replacement, as of `OldLogProbs.replacements`.
        """
        plan = plan_method(
            target,
            method,
            given,
            arguments,
            seed=self._seed,
            step=self.step,
            draw=partial(self._draws.take, self.step, self.phase),
            instead=instead or {},
        )
        if plan.spec.minibatches:
            for command in plan.commands.values():
                command["total_steps"] = self.total_steps
        return plan

    def map(self, batch: Batch, function: Callable[..., Any], settings: Mapping[str, Any]) -> Batch:
        """Run a map function on the ranks that hold most of the columns that it reads."""
        made = self._run(plan_map(batch, function, settings, step=self.step, busy=self.busy), batch)
        assert isinstance(made, Batch)
        return made

    def _run(self, plan: CallPlan, batch: Batch | None) -> Batch | Result:
        """Send the transfers of missing rows and the commands; return the result, still lazy."""
        writes = plan.spec.writes
        result = None
        if batch is not None and writes:
            result = plan.result(self.next_number(), self.free)
        for given, names, rows in plan.needs:  # first: the rows are under way before the call
            self.transfers.need(given, names, rows)
        pending = self.submit(
            plan.label, plan.commands, result=result, kept=batch, answering=plan.answering
        )
        if batch is None or result is None:
            return Result(plan.label, pending, plan.answering)
        columns = {}
        for name in writes:
            columns[name] = ColumnRef(result, batch.ids, name)
        if plan.spec.extends:
            columns = carried_columns(plan.spec, batch) | columns
        made = Batch(self, batch.ids, batch.parents, columns)
        if "response_text" in writes and "prompt_text" in batch.columns:
            self.scored[self.phase] = made | batch.drop(*set(writes) & set(batch.columns))
        return made

    # Orders

    def next_number(self) -> int:
        """The number of the next call or result."""
        self._last_number += 1
        return self._last_number

    def free(self, result: int) -> None:
        """A result lost its last reference; ranks hear of it with the next command."""
        self._freed.append(result)

    def submit(
        self,
        label: str,
        commands: Mapping[int, dict[str, Any]],
        *,
        result: RowResult | None = None,
        kept: object = None,
        answering: tuple[int, ...] = (),
        seconds: float | None = None,
        lane: str = "compute",
    ) -> Pending:
        """Send one numbered command to each rank of `commands`; metrics of answering count.

        result: what the command makes, which learns from the replies. kept: its inputs, which live
        until then. seconds: the limit of each command, by default that of calls. MessageError if
        nothing was sent.
        """

        def done(replies: Replies, _kept: object = kept) -> None:
            if result is not None:
                result.learn(replies)

        number = self.next_number() if result is None else result.number
        freed = []
        for _ in range(len(self._freed)):
            freed.append(self._freed.popleft())
        for rank in self.ranks if freed else ():
            self._unsent.setdefault(rank, []).extend(freed)
        for rank, command in commands.items():  # ranks that it does not reach hear of it later
            if rank in self._unsent:
                command["free"] = self._unsent.pop(rank)
        limit = self._seconds if seconds is None else seconds
        phase = self.phase
        order = Order(number, lane, label, commands, limit, done, phase=phase, line=script_line())
        try:
            pending = self.transport.submit(order)
        except MessageError:  # the script may go on
            for rank, command in commands.items():
                self._unsent.setdefault(rank, []).extend(command.pop("free", []))
            raise
        record = CallRecord(number, label, phase, commands, pending, answering, self.step, lane)
        self.records.append(record)
        if self.captured is not None:
            self.captured.append((record, result, kept))
        return pending

    def wait_for(self, result: RowResult) -> None:
        """Block until the call that makes the result has replied."""
        for record in self.records:
            if record.number == result.number:
                record.pending.result()

    # What batches ask

    def fetch(
        self, batch: Batch, names: Sequence[str], *, purpose: str
    ) -> dict[str, Tensor | list[str]]:
        """Values of columns on the controller; the bytes are counted under `purpose`."""
        values = {}
        for name in names:
            values[name] = self.column(name, batch.column(name), purpose=purpose).to_value()
        return values

    def column(
        self, name: str, ref: ColumnRef, *, purpose: str, piece_bytes: int = PIECE_BYTES
    ) -> Column:
        """The rows that a reference names, on the controller.

        They travel in pieces of at most piece_bytes, as a reply is one message; a single row may
        have MAX_MESSAGE_BYTES.
        """
        pieces = []
        ids = []
        for part in self._pieces_of(ref, piece_bytes):
            fetched, fetched_ids = self._fetch_rows(name, part)
            pieces.append(fetched)
            ids.append(fetched_ids)
        column = join(pieces)
        all_ids = np.concatenate(ids)
        self.fetched_bytes[purpose] += column.values.nbytes
        order = np.argsort(all_ids, kind="stable")
        place = order[np.searchsorted(all_ids, ref.ids, sorter=order)]
        return column.take(torch.from_numpy(place))

    def _pieces_of(self, ref: ColumnRef, piece_bytes: int) -> list[ColumnRef]:
        """The rows of a reference, each once, in parts of at most piece_bytes; at least one part.

        A row that is larger is a part of its own.
        """
        whole = ColumnRef(ref.result, np.unique(ref.ids), ref.stored)
        if isinstance(ref.result, RowResult):
            self.wait_for(ref.result)
            row_bytes = whole.row_bytes() + _ROW_HEAD_BYTES
        else:
            row_bytes = np.full(len(whole.ids), _SOURCE_ROW_BYTES)
        cuts = cut_rows(row_bytes, piece_bytes)
        pieces = []
        for places in np.split(np.arange(len(whole.ids)), cuts):
            pieces.append(whole.at(places))
        return pieces

    def _fetch_rows(self, name: str, ref: ColumnRef) -> tuple[Column, Ids]:
        """The rows of a column, each once, and their ids, rank by rank."""
        ids = np.unique(ref.ids)
        result = ref.result
        parts = {self.ranks[0]: ids}
        if isinstance(result, RowResult):
            self.wait_for(result)
            owner = result.owners(ids)
            parts = {}
            for rank in np.unique(owner):
                parts[int(rank)] = ids[owner == rank]
            parts = parts or {next(iter(result.answer)): ids}
        commands = {}
        for rank, own in parts.items():
            commands[rank] = {
                "operation": "fetch",
                "input": input_of(result, {name: ref.stored}, own),
            }
        lane = "compute" if self.busy.isdisjoint(commands) else "transfer"
        replies = self.submit(f"fetch {name}", commands, lane=lane).result()
        columns = []
        for rank in parts:
            columns.append(read_message(replies[rank]["column"]))
        return join(columns), np.concatenate(list(parts.values()))

    def lengths(self, ref: ColumnRef) -> np.ndarray:
        """(B,) items of each row; waits for the producer."""
        if isinstance(ref.result, SourceRows):
            return ref.result.lengths_of(ref.stored, ref.ids)
        self.wait_for(ref.result)
        return ref.result.facts[ref.stored].lengths_of(ref.ids)

    def is_text(self, ref: ColumnRef) -> bool:
        """Whether a column is text that a call has made; waits for the call."""
        if isinstance(ref.result, SourceRows):
            return False
        self.wait_for(ref.result)
        return ref.result.facts[ref.stored].spec.kind == "text"

    def metrics_of(self, results: Iterable[RowResult]) -> Mapping[str, float]:
        """What the calls that made the results reported, merged; waits for them."""
        metrics = []
        for result in results:
            self.wait_for(result)
            metrics += result.metrics
        return ReportedMetrics(merge(metrics), self.old_log_probs.omitted_metrics())

    def why_missing(self, column: str) -> str:
        """Why no call has written a column that one may be expected to write; empty: unknown."""
        return self.old_log_probs.why_missing(column)

    # Rows of several calls as rows of one result

    def join(self, columns: Mapping[str, Sequence[ColumnRef]], ids: Ids) -> dict[str, ColumnRef]:
        """Columns of rows that several calls made, one after the other, under row ids `ids`.

        Columns made by the same calls share a result again. Joined rows do not travel: each stays
        with the rank that answers for it; of a data file every rank can read them.
        """
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, parts in columns.items():
            has_one_name = len({part.stored for part in parts}) == 1
            origins = ((part.result.number, part.ids.tobytes()) for part in parts)
            groups.setdefault((has_one_name, *origins), []).append(name)
        refs: dict[str, ColumnRef] = {}
        for (has_one_name, *_), names in groups.items():
            parts = columns[names[0]]
            sources = []
            for part in parts:
                if isinstance(part.result, SourceRows):
                    sources.append(part.result)
            is_of_one_file = len(sources) == len(parts) and len({s.label for s in sources}) == 1
            result: RowResult | SourceRows = parts[0].result
            rows = ids
            if has_one_name and all(part.result is result for part in parts):
                rows = np.concatenate([part.ids for part in parts])
            elif has_one_name and is_of_one_file:
                read = []
                for s, part in zip(sources, parts, strict=True):
                    read.append(s.part(part.ids))
                places = np.concatenate([places for places, _ in read])
                known = [tokens for _, tokens in read if tokens is not None]
                tokens = np.concatenate(known) if len(known) == len(read) else None
                result = SourceRows(
                    self.next_number(), sources[0].label, ids, places, self.free, tokens
                )
            else:
                result = self._join_made({name: columns[name] for name in names}, ids)
                refs |= {name: ColumnRef(result, ids, name) for name in names}
                continue
            refs |= {name: ColumnRef(result, rows, columns[name][0].stored) for name in names}
        return refs

    def _join_made(self, columns: Mapping[str, Sequence[ColumnRef]], ids: Ids) -> RowResult:
        """A result that each rank assembles from the rows that it holds of the parts."""
        number = self.next_number()
        commands: dict[int, dict[str, Any]] = {}
        answer: dict[int, list[Ids]] = {}
        name, first = next(iter(columns.items()))
        made = _results_of_calls(name, first)
        readers = sorted(made[0].answer)  # of rows of a data file that are joined with others
        start = 0
        for place, part in enumerate(first):
            own_ids = ids[start : start + len(part.ids)]
            start += len(part.ids)
            names = {name: parts[place].stored for name, parts in columns.items()}
            if isinstance(part.result, RowResult):
                owner = part.result.owners(part.ids)
            else:
                shares = np.array_split(part.ids, len(readers))
                owner = np.repeat(readers, [len(share) for share in shares])
            for rank in np.unique(owner).tolist():
                rows = np.flatnonzero(owner == rank)
                command = commands.setdefault(rank, {"operation": "join", "inputs": []})
                command["inputs"].append(input_of(part.result, names, part.ids[rows]))
                answer.setdefault(rank, []).append(own_ids[rows])
        held = {}
        for rank, lists in answer.items():
            held[rank] = np.concatenate(lists)
        for rank, command in commands.items():
            command["ids"] = held[rank]
        ranks = tuple(sorted({rank for result in made for rank in result.ranks}))
        by_column = dict.fromkeys(columns, held)
        sources = frozenset().union(*(each.lineage for each in made))
        result = RowResult(
            number, "batch.concatenate", ranks, held, by_column, self.free, sources=sources
        )
        pools = {each.ranks for each in made}
        result.spans_pools = len(pools) > 1 or any(each.spans_pools for each in made)
        self.submit(result.label, commands, result=result, kept=tuple(first))
        return result


def _results_of_calls(name: str, parts: Sequence[ColumnRef]) -> list[RowResult]:
    """The parts of a column that calls have made; ColumnError if all come from data files."""
    results = []
    for part in parts:
        if isinstance(part.result, RowResult):
            results.append(part.result)
    if not results:
        labels = dict.fromkeys(part.result.label for part in parts)
        raise ColumnError(
            f"concatenate: the column {name!r} comes from {' and '.join(labels)}, expected at "
            f"least one part that a call has made, or one data file; drop the column first"
        )
    return results
