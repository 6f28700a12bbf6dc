"""Turns calls of the script into numbered commands, and their answers into lazy batches.

Script thread only. A call is planned completely before anything is sent (planning.py). Then
transfers of missing rows start, each rank gets its command, and a lazy result is returned at once.
Rows pass through the controller only in `fetch`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmdflow.config.schema import RunConfig
from spmdflow.controller.ahead import RunningAhead
from spmdflow.controller.assignment import Target
from spmdflow.controller.batch import Batch
from spmdflow.controller.draw_count import DrawCounts
from spmdflow.controller.extending import carried_columns
from spmdflow.controller.joining import plan_join
from spmdflow.controller.old_log_probs import RECOMPUTE, ROLLOUT, OldLogProbs
from spmdflow.controller.on_demand import OnDemand, join_or_postpone, make_postponed
from spmdflow.controller.planning import (
    CallContext,
    Input,
    Method,
    columns_of_map,
    columns_read,
    plan_map,
    plan_method,
    script_line,
)
from spmdflow.controller.result import (
    ColumnRef,
    OnRead,
    Ref,
    ReportedMetrics,
    Result,
    RowResult,
    SourceRows,
    cut_rows,
    ignore_reads,
    nothing,
)
from spmdflow.controller.row_use import RowUses
from spmdflow.controller.transfers import Transfers
from spmdflow.data.column import Column, join, read_message
from spmdflow.data.row_id import Ids, RowIds
from spmdflow.errors import MessageError
from spmdflow.runtime.call import Call, CallRecord, Pending, Replies, Transport, with_freed
from spmdflow.runtime.executor import COMPUTE, TRANSFER
from spmdflow.tracking.metric import merge
from spmdflow.worker_api.register import MethodSpec

PIECE_BYTES = 32 << 20
"""Rows that the controller fetches travel in pieces of at most this size."""
_SOURCE_ROW_BYTES = 64 << 10
"""What a row of a data file is taken to have, as the controller does not know it."""
_ROW_HEAD_BYTES = 16
"""Of a row that is fetched: its id in the command, its length in the reply."""


class Caller:
    """Makes calls, keeps track of which rank has which rows, and serves batches."""

    def __init__(
        self,
        transport: Transport,
        run: RunConfig,
        ranks: tuple[int, ...],
        *,
        on_read: OnRead = ignore_reads,
    ) -> None:
        """run: its seed and limits. ranks: every rank of the run, the controller's first.

        on_read: called with the names of the metrics that the script reads.
        """
        self._on_read = on_read
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
        self.line: str | None = None
        """Line of the script that asked for the next calls; None: the one that runs."""
        self.calls: list[Pending] = []
        """Calls of the running step, without transfers, in the order of the script."""
        self.scored: dict[str, Batch] = {}
        """The step's last rows with texts and a score, by phase; sample tables show them."""
        self.learnt: Batch | None = None
        """The last rows that an update of the running step was given."""
        self.uses = RowUses()
        """Which rows the calls of the running step were given; tokens are counted afterwards."""
        self.num_updates: Counter[str] = Counter()
        """Updates of this launch by model."""
        self.ahead = RunningAhead()
        self.captured: list[tuple[Pending, RowResult | None, Batch | None]] | None = None
        """Calls of a step that is kept (capsule.py), what they make and their inputs."""
        self.is_skipped: Callable[[Batch], bool] | None = None
        """Asked before an update: whether to leave it out (guarding.py)."""
        self.fetched_bytes: Counter[str] = Counter()
        self.row_ids = RowIds()
        self.old_log_probs = OldLogProbs()
        self.on_demand = OnDemand()
        self._draws = DrawCounts()
        self._last_number = 0
        self.freed: deque[int] = deque()
        """Results that nobody refers to any more; ranks hear of them with their next command."""
        self._unsent: dict[int, list[int]] = {}

    def nodes(self) -> list[int]:
        """Return the node of every global rank, up to the run's highest; -1: not in the run."""
        nodes = [-1] * (max(self.ranks) + 1)
        for rank in self.ranks:
            nodes[rank] = self.transport.node_of(rank)
        return nodes

    @property
    def records(self) -> list[CallRecord]:
        """The calls of the running step and their replies; waits for them."""
        return [pending.record() for pending in self.calls]

    # Calls

    def invoke(
        self,
        target: Target,
        method: Method,
        data: Batch | list[Any] | None,
        arguments: Mapping[str, Any],
    ) -> Batch | Result:
        """Call a registered method of a worker group; return its lazy answer (paper section 4.1).

        A method that writes columns returns a Batch, any other a Result. An update may be skipped
        (`_update`). `compute_log_prob` may be answered without running (`_without_running`), and a
        method on demand may be postponed (on_demand.py). If the method has a `followed_by`, its map
        function then runs, and its columns join the answer. Errors of planning are raised before
        anything is sent.
        """
        spec = method.spec
        if self.on_demand.postpones(target, method) and isinstance(data, Batch):
            later = partial(self.invoke, target, method, data, arguments)
            return self.on_demand.postpone(self.next_number(), target, method, data, later)
        self.on_demand.build(target.name)
        if isinstance(data, Batch):
            make_postponed(data, spec, getattr(target.worker_class, method.name))
        else:
            return self._send(self._plan(target, method, data, arguments), None)
        answer: Batch | Result | None = None
        if spec.instead and spec.writes:
            answer = self._without_running(target, method, data)
        if answer is None and spec.minibatches and not spec.writes:
            answer = self._update(target, method, data, arguments)
        if answer is None:
            call = self._plan(target, method, data, arguments)
            answer = self._send(call, data, extends=spec if spec.extends else None)
        following = spec.followed_by(target.settings) if spec.followed_by else None
        if following is not None and isinstance(answer, Batch):
            function, settings = following
            answer |= self.map(data | answer, function, settings)
        return answer

    def _without_running(self, target: Target, method: Method, batch: Batch) -> Batch | None:
        """Return the answer of `compute_log_prob` if nothing has to be computed; None: it must run.

        `OldLogProbs.source` decides. rollout: a batch whose columns refer to those of the
        generator. own: a batch without columns, and the rows are remembered as omitted. ColumnError
        if the batch lacks a column that the method reads, as if it ran.
        """
        spec = method.spec
        columns_read(spec, batch, f"{target.name}.{method.name}")  # as where it runs
        source = self.old_log_probs.source(target, spec, batch)
        if source == RECOMPUTE:
            return None
        columns = {}
        if source == ROLLOUT:
            for name, other in spec.instead.items():
                columns[name] = batch.column(other)
        else:
            self.old_log_probs.omit(target, batch, self.num_updates[target.name])
        return Batch(self, batch.ids, batch.parents, columns, batch.shares)

    def _update(
        self, target: Target, method: Method, batch: Batch, arguments: Mapping[str, Any]
    ) -> Batch | Result:
        """Send an update of a model on these rows, unless a guard skips it; return a lazy result.

        A skipped update returns a result without metrics. Otherwise the batch becomes `learnt`, and
        the model's number of updates grows by one.
        """
        if self.is_skipped is not None and self.is_skipped(batch):
            return nothing(f"{target.name}.{method.name}")
        num_updates = self.num_updates[target.name]
        instead = self.old_log_probs.replacements(target, method.spec, batch, num_updates)
        call = self._plan(target, method, batch, arguments, instead=instead)
        self.learnt = batch
        self.num_updates[target.name] += 1
        return self._send(call, batch)

    def _plan(
        self,
        target: Target,
        method: Method,
        data: Batch | list[Any] | None,
        arguments: Mapping[str, Any],
        *,
        instead: Mapping[str, str] | None = None,
    ) -> Call:
        """The call. instead: column -> replacement, as of `OldLogProbs.replacements`."""
        return plan_method(
            target,
            method,
            data,
            arguments,
            self._context(),
            draw=partial(self._draws.take, self.step, self.phase),
            instead=instead or {},
        )

    def map(self, batch: Batch, function: Callable[..., Any], settings: Mapping[str, Any]) -> Batch:
        """Run a map function on the ranks that have most of the columns that it reads.

        settings: its arguments. Returns a lazy batch of the columns that it writes.
        """
        make_postponed(batch, columns_of_map(batch, function, settings), function)
        call = plan_map(batch, function, settings, self._context(), busy=self.ahead.ranks)
        answer = self._send(call, batch)
        assert isinstance(answer, Batch)
        return answer

    def _context(self) -> CallContext:
        """What the next call takes from this place in the run."""
        return CallContext(
            number=self._last_number + 1,
            step=self.step,
            phase=self.phase,
            line=self.line or script_line(),
            limit_seconds=self._seconds,
            seed=self._seed,
            total_steps=self.total_steps,
        )

    def _send(
        self, call: Call, batch: Batch | None, *, extends: MethodSpec | None = None
    ) -> Batch | Result:
        """Send the transfers of rows that a call's ranks lack, then the call; return its answer.

        The answer is lazy: a Result if the call writes no columns, otherwise a Batch of these
        columns. extends: the spec of a method whose answer also has those columns of the batch that
        are still valid. An answer with response texts to prompt texts becomes the phase's entry of
        `scored`.
        """
        if batch is None:
            return Result(call.label, self._submit(call), call.reply_ranks, self._on_read)
        self._last_number = call.number
        result = RowResult.of(call, self.freed.append) if call.writes else None
        inputs = {}
        for ref in batch.refs.values():
            if not ref.is_postponed:
                result_of_ref = ref.resolve().result
                inputs[result_of_ref.number] = result_of_ref
        makers: set[int] = set()
        for required in call.required_rows:  # first: the rows are under way before the call
            source = inputs[required.result]
            assert isinstance(source, RowResult), source.label
            makers |= source.answer.keys()
            self.transfers.need(source, required.columns, required.rows, step=call.step)
        pending = self._submit(call, result, batch, makers=makers)
        self.uses.add(call, batch, result)
        if result is None:
            return Result(call.label, pending, call.reply_ranks, self._on_read)
        columns: dict[str, Ref] = {}
        for name in call.writes:
            columns[name] = ColumnRef(result, batch.ids, name)
        if extends is not None:
            columns = carried_columns(extends, batch) | columns
        answer = Batch(self, batch.ids, batch.parents, columns, batch.shares)
        if "response_text" in call.writes and "prompt_text" in batch.refs:
            self.scored[self.phase] = answer | batch.drop(*set(call.writes) & set(batch.refs))
        return answer

    def next_number(self) -> int:
        """The number of the next call or result."""
        self._last_number += 1
        return self._last_number

    def submit(
        self,
        label: str,
        commands: Mapping[int, Mapping[str, Any]],
        *,
        reply_ranks: tuple[int, ...] = (),
        seconds: float | None = None,
        lane: str = COMPUTE,
    ) -> Pending:
        """Send a call without rows, one command for each rank; return its pending replies.

        reply_ranks: the ranks whose metrics count. seconds: its time limit, by default
        run.call_seconds. MessageError if a command is no plain data; then nothing was sent.
        """
        call = self._context().call(label, commands, lane=lane, reply_ranks=reply_ranks)
        if seconds is not None:
            call = replace(call, limit_seconds=seconds)
        return self._submit(call)

    def _submit(
        self,
        call: Call,
        result: RowResult | None = None,
        kept: object = None,
        *,
        makers: AbstractSet[int] = frozenset(),
    ) -> Pending:
        """Send a call with the freed results that its ranks must forget; return pending replies.

        result: the rows that it makes. It gets dtypes and lengths from the replies. kept: its
        inputs, which are kept alive until all ranks have replied. makers: the ranks that make its
        inputs. A generator that generates ahead on the call's ranks is interrupted when these
        ranks have made them, and goes on behind the call. Adds the call to `calls` and, in
        a step that is kept, to `captured`. MessageError if nothing was sent; then a later command
        lists the freed results.
        """

        def on_done(replies: Replies, _kept: object = kept) -> None:
            if result is not None:
                result.learn(replies)

        self._last_number = max(self._last_number, call.number)
        with self.ahead.interrupt_for(call, makers):
            freed = self._take_freed(call.commands)
            try:
                pending = self.transport.submit(with_freed(call, freed), on_done)
            except MessageError:  # the script may go on
                for rank, numbers in freed.items():
                    self._unsent.setdefault(rank, []).extend(numbers)
                raise
            if result is not None:
                result.pending = pending
            self.calls.append(pending)
        if self.captured is not None:
            self.captured.append((pending, result, kept if isinstance(kept, Batch) else None))
        return pending

    def _take_freed(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        """Return the freed results that these ranks still have to forget, by rank.

        Notes them as sent, and empties `freed`. The other ranks get theirs with their next command.
        Ranks that have to forget nothing are omitted.
        """
        new = []
        for _ in range(len(self.freed)):
            new.append(self.freed.popleft())
        for rank in self.ranks if new else ():
            self._unsent.setdefault(rank, []).extend(new)
        freed = {}
        for rank in ranks:
            if rank in self._unsent:
                freed[rank] = self._unsent.pop(rank)
        return freed

    # What batches ask

    def fetch(
        self, batch: Batch, names: Sequence[str], *, purpose: str
    ) -> dict[str, Tensor | list[str]]:
        """Return the values of columns on the controller, by name; waits for their producers.

        Adds the bytes to fetched_bytes[purpose]. ColumnError for a column that the batch lacks.
        """
        values = {}
        for name in names:
            values[name] = self.column(name, batch.column(name), purpose=purpose).to_value()
        return values

    def column(
        self, name: str, ref: Ref, *, purpose: str, piece_bytes: int = PIECE_BYTES
    ) -> Column:
        """Fetch the rows of a reference to the controller, in the order of its ids; waits for them.

        A row that occurs several times travels once. The rows travel in pieces of at most
        piece_bytes, because a reply is one message; a single row may have MAX_MESSAGE_BYTES. Adds
        the bytes to fetched_bytes[purpose]. Makes a postponed call.
        """
        known = ref.resolve()
        pieces = []
        ids = []
        for part in self._pieces_of(known, piece_bytes):
            fetched, fetched_ids = self._fetch_rows(name, part)
            pieces.append(fetched)
            ids.append(fetched_ids)
        column = join(pieces)
        all_ids = np.concatenate(ids)
        self.fetched_bytes[purpose] += column.values.nbytes
        order = np.argsort(all_ids, kind="stable")
        positions = order[np.searchsorted(all_ids, known.ids, sorter=order)]
        return column.take(torch.from_numpy(positions))

    def _pieces_of(self, ref: ColumnRef, piece_bytes: int) -> list[ColumnRef]:
        """Cut the distinct rows of a reference into one or more parts of at most piece_bytes.

        The ids ascend. A larger row is a part on its own. Rows of a data file count 64 KiB each,
        because the controller does not know their size. Waits for the call that makes the rows.
        """
        whole = ColumnRef(ref.result, np.unique(ref.ids), ref.stored)
        if isinstance(ref.result, RowResult):
            ref.result.wait()
            row_bytes = whole.row_bytes() + _ROW_HEAD_BYTES
        else:
            row_bytes = np.full(len(whole.ids), _SOURCE_ROW_BYTES)
        cuts = cut_rows(row_bytes, piece_bytes)
        pieces = []
        for positions in np.split(np.arange(len(whole.ids)), cuts):
            pieces.append(whole.at(positions))
        return pieces

    def _fetch_rows(self, name: str, ref: ColumnRef) -> tuple[Column, Ids]:
        """Fetch the distinct rows of a reference; return them and their ids, ordered by rank.

        Each row comes from the rank that answers for it, or from the first rank if it is of a data
        file. Waits. Uses the transfer lane if the compute lane of one of the ranks is busy with
        rows of later steps.
        """
        ids = np.unique(ref.ids)
        result = ref.result
        parts = {self.ranks[0]: ids}
        if isinstance(result, RowResult):
            result.wait()
            owner = result.owners(ids)
            parts = {}
            for rank in np.unique(owner):
                parts[int(rank)] = ids[owner == rank]
            parts = parts or {next(iter(result.answer)): ids}
        commands = {}
        for rank, own in parts.items():
            commands[rank] = {
                "operation": "fetch",
                "input": Input.of(result, {name: ref.stored}, own).part(),
            }
        lane = COMPUTE if self.ahead.ranks.isdisjoint(commands) else TRANSFER
        replies = self.submit(f"fetch {name}", commands, lane=lane).result()
        columns = []
        for rank in parts:
            columns.append(read_message(replies[rank]["column"]))
        return join(columns), np.concatenate(list(parts.values()))

    def lengths(self, ref: Ref) -> np.ndarray:
        """Return (B,) int64: items of each row, 1 if the column is dense; waits for the producer.

        ColumnError for a column of a data file whose lengths the controller does not know.
        """
        known = ref.resolve()
        if isinstance(known.result, SourceRows):
            return known.result.lengths_of(known.stored, known.ids)
        known.result.wait()
        return known.result.facts[known.stored].lengths_of(known.ids)

    def is_text(self, ref: Ref) -> bool:
        """Return whether a column is text that a call has made; waits for the call.

        False for every column of a data file.
        """
        known = ref.resolve()
        if isinstance(known.result, SourceRows):
            return False
        known.result.wait()
        return known.result.facts[known.stored].spec.kind == "text"

    def metrics_of(self, results: Iterable[RowResult]) -> Mapping[str, float]:
        """Return what the calls that made the results reported, merged; waits for them.

        Reading a metric that none has reported raises UnknownMetric, which says why it is missing.
        """
        metrics = []
        for result in results:
            result.wait()
            metrics += result.metrics
        omitted = self.old_log_probs.omitted_metrics() | self.on_demand.omitted_metrics()
        return ReportedMetrics(merge(metrics), omitted, self._on_read)

    def why_missing(self, column: str) -> str:
        """Why no call has written a column that one may be expected to write; empty: unknown."""
        return self.old_log_probs.why_missing(column)

    # Rows of several calls as rows of one result

    def join(self, columns: Mapping[str, Sequence[Ref]], ids: Ids) -> dict[str, Ref]:
        """Concatenate the parts of each column under the row ids `ids`; return references by name.

        columns: name -> its parts in order. Parts of one result need no call: the reference repeats
        the result's ids. Neither do parts of one data file. Otherwise each rank joins the rows that
        it answers for, in one call for all columns with the same origin, so that these share a
        result again. Joined rows do not travel. If a part is postponed, so is its column.
        """
        return join_or_postpone(columns, ids, self._join_there, self.next_number)

    def _join_there(
        self, columns: Mapping[str, Sequence[ColumnRef]], ids: Ids
    ) -> dict[str, ColumnRef]:
        """As `join`, for columns of which no part is postponed."""
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
                file_rows = np.concatenate([file_rows for file_rows, _ in read])
                known = [tokens for _, tokens in read if tokens is not None]
                tokens = np.concatenate(known) if len(known) == len(read) else None
                result = SourceRows(
                    self.next_number(), sources[0].label, ids, file_rows, self.freed.append, tokens
                )
            else:
                result = self._join_made({name: columns[name] for name in names}, ids)
                refs |= {name: ColumnRef(result, ids, name) for name in names}
                continue
            refs |= {name: ColumnRef(result, rows, columns[name][0].stored) for name in names}
        return refs

    def _join_made(self, columns: Mapping[str, Sequence[ColumnRef]], ids: Ids) -> RowResult:
        """Send the call in which each rank joins its rows of the parts; return the joined result.

        The result has all ranks of the results that it joins. Its `spans_pools` is True if their
        ranks differ, or if one of them spans pools. ids: the row ids of all parts in the new
        result. ColumnError if no part was made by a call.
        """
        call, sources = plan_join(columns, ids, self._context())
        result = RowResult.of(call, self.freed.append)
        result.ranks = tuple(sorted({rank for each in sources for rank in each.ranks}))
        pools = {each.ranks for each in sources}
        result.spans_pools = len(pools) > 1 or any(each.spans_pools for each in sources)
        self._submit(call, result, tuple(columns.values()))
        return result
