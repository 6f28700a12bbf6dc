"""Which rows travel between ranks before a call, when they are released, and their bytes.

A transfer is released when the call that makes its rows has replied: only then are dtypes and
lengths known. Rows never pass through the controller.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from spmdflow.blocks.rows import RowEdge, plan_rounds
from spmdflow.controller.result import RowResult
from spmdflow.data.row_id import Ids
from spmdflow.errors import TransferError
from spmdflow.runtime.call import Call, Pending, Replies, Transport
from spmdflow.runtime.executor import TRANSFER

Edge = tuple[int, int]
Edges = Mapping[tuple[int, int, bytes], tuple[list[str], RowEdge]]
"""Columns that travel together and their rows, by (source, destination, row ids)."""


class Transfers:
    """All row transfers of a run: plans what rows travel, releases each transfer when its producer
    has replied, counts bytes.

    `need` runs in the script thread; releasing and counting run in the io thread, which alone knows
    dtypes and lengths and writes the fields below. The script reads them under the lock, as copies.
    """

    def __init__(self, transport: Transport, *, seconds: float) -> None:
        self._transport = transport
        self.seconds = seconds
        self._lock = threading.Lock()
        self._planned: Counter[Edge] = Counter()
        self._moved: Counter[Edge] = Counter()
        self._header_bytes = 0
        self._num_released = 0
        self._outstanding: list[Pending] = []

    @property
    def planned_bytes(self) -> Counter[Edge]:
        """Of rows by (source, destination), since the run began; a copy."""
        with self._lock:
            return self._planned.copy()

    @property
    def moved_bytes(self) -> Counter[Edge]:
        """As planned_bytes, as the ranks counted them."""
        with self._lock:
            return self._moved.copy()

    @property
    def header_bytes(self) -> int:
        """Sent besides the rows: one short header for each edge of a transfer."""
        with self._lock:
            return self._header_bytes

    def need(
        self, result: RowResult, names: Sequence[str], need: Mapping[int, Ids], *, step: int
    ) -> None:
        """Plan transfers so that each rank gets its rows `need[rank]` of `names` (script thread).

        Only rows that a rank lacks travel, once their producer has replied; does not wait.
        result.holders has them from now on. A rank that needs no rows and has never had the column
        gets an empty one, from itself. step: of the script, for the records.
        """
        columns_by_holders: dict[int, tuple[list[str], dict[int, Ids]]] = {}
        for name in names:
            holders = result.holders[name]
            columns_by_holders.setdefault(id(holders), ([], holders))[0].append(name)
        rounds: list[dict[tuple[int, int, bytes], tuple[list[str], RowEdge]]] = [{}, {}]
        for columns, holders in columns_by_holders.values():
            after = _rows_after(holders, need)
            if not after:
                continue
            lacking = {}
            for rank in after:
                lacking[rank] = need[rank]
            planned_rounds = plan_rounds(holders, lacking, node_of=self._transport.node_of)
            for rank, ids in lacking.items():
                if not len(ids):
                    planned_rounds[0].append(RowEdge(rank, rank, ids))
            for edges, planned in zip(rounds, planned_rounds, strict=False):
                for edge in planned:
                    key = (edge.source, edge.destination, edge.ids.tobytes())
                    edges.setdefault(key, ([], edge))[0].extend(columns)
            result.holders |= dict.fromkeys(columns, {**holders, **after})
        for edges in rounds:
            if edges:
                self._transport.post(partial(self._offer, result, edges, step))

    def take_outstanding(self) -> list[Pending]:
        """Return the transfers released since the last call, which the end of a step waits for.

        Empties the list; safe in any thread.
        """
        with self._lock:
            outstanding = self._outstanding
            self._outstanding = []
        return outstanding

    def _offer(self, result: RowResult, edges: Edges, step: int) -> None:
        """Release a transfer now, or when the rows are made."""
        if result.done:
            self._release(result, edges, step)
        else:
            result.waiting.append(partial(self._release, result, edges, step))

    def _release(self, result: RowResult, edges: Edges, step: int) -> None:
        """Send the commands of a transfer to its senders and receivers; count the planned bytes.

        Runs in the io thread, once the kinds and lengths of the rows are known. edges: what
        travels.
        """
        self._num_released += 1
        planned: Counter[Edge] = Counter()
        commands: dict[int, dict[str, Any]] = {}
        kinds = {name: fact.spec.to_plain() for name, fact in result.facts.items()}
        for names, edge in edges.values():
            index = np.searchsorted(result.facts[names[0]].ids, edge.ids)
            lengths = {}
            size = 0
            for name in names:
                fact = result.facts[name]
                items = len(edge.ids)
                if fact.lengths is not None:
                    lengths[name] = fact.lengths[index]
                    items = int(lengths[name].sum())
                size += items * fact.spec.item_bytes
            of_names = {}
            for name in names:
                of_names[name] = kinds[name]
            received = [edge.source, names, edge.ids, of_names, lengths]
            _command(commands, edge.destination, result)["receives"].append(received)
            if edge.source != edge.destination:
                sent = [edge.destination, names, edge.ids]
                _command(commands, edge.source, result)["sends"].append(sent)
                planned[edge.source, edge.destination] += size
        with self._lock:
            self._planned.update(planned)
        label = f"transfer {self._num_released} of {result.label}"
        number = self._num_released
        kind = f"transfer of {result.label}"
        call = Call(number, TRANSFER, label, commands, self.seconds, step=step, kind=kind)
        pending = self._transport.submit(call, partial(self._count, result, label, planned))
        with self._lock:
            self._outstanding.append(pending)

    def _count(
        self, _kept: RowResult, label: str, planned: Counter[Edge], replies: Replies
    ) -> None:
        """Add the bytes that the ranks moved to the totals (io thread).

        TransferError unless, on every edge, the bytes sent and received are the planned ones. As an
        argument of this callback, the result stays alive while its holders send its rows.
        """
        sent = {}
        for r, reply in replies.items():
            for to, n in reply["sent"].items():
                sent[(r, to)] = n
        got = {}
        for r, reply in replies.items():
            for at, n in reply["received"].items():
                got[(at, r)] = n
        expected = dict(+planned)
        if not sent == got == expected:
            raise TransferError(
                f"{label}: sent {sent}, received {got}, expected {expected} bytes by edge; "
                f"the ranks and the plan disagree: report this with RUN_DIR/trace.json"
            )
        with self._lock:
            self._moved.update(got)
            self._header_bytes += sum(reply["header_bytes"] for reply in replies.values())


def _command(commands: dict[int, dict[str, Any]], rank: int, result: RowResult) -> dict[str, Any]:
    empty = {"operation": "transfer", "result": result.number, "sends": [], "receives": []}
    return commands.setdefault(rank, empty)


def _rows_after(holders: Mapping[int, Ids], need: Mapping[int, Ids]) -> dict[int, Ids]:
    """Return, for each rank that lacks needed rows, the ids that it has after the transfer.

    Ranks that lack nothing are omitted. Ranks with the same rows and needs share one array.
    """
    unions: dict[tuple[int, int], Ids | None] = {}
    after: dict[int, Ids] = {}
    for rank, ids in need.items():
        pair = (id(holders.get(rank)), id(ids))
        if pair not in unions:
            unions[pair] = _union_or_none(holders.get(rank), ids)
        union = unions[pair]
        if union is not None:
            after[rank] = union
    return after


def _union_or_none(holders: Ids | None, ids: Ids) -> Ids | None:
    """Return the ids that a rank has after it was given the rows `ids`; None if it has them all.

    holders: the ids that it has before. None: it has never had the column, and gets `ids`, which
    may be empty.
    """
    if holders is None:
        return ids
    if holders is ids or (len(holders) == len(ids) and np.array_equal(holders, ids)):
        return None
    if np.isin(ids, holders).all():
        return None
    return np.union1d(holders, ids)
