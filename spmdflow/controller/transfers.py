"""Plans what rows travel, releases each transfer when its producer has replied, counts bytes.

`need` runs in the script thread and keeps the account of who holds what; releasing runs in the
io thread, which alone knows dtypes and lengths. The two never touch the same fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from spmdflow.blocks.rows import RowEdge, plan_rounds
from spmdflow.controller.result import CallRecord, RowResult
from spmdflow.data.row_id import Ids
from spmdflow.errors import TransferError
from spmdflow.runtime.order import Order, Replies, Transport

Edge = tuple[int, int]
Edges = Mapping[tuple[int, int, bytes], tuple[list[str], RowEdge]]
"""Columns that travel together and their rows, by (source, destination, row ids)."""


class Transfers:
    """All row transfers of a run."""

    def __init__(self, transport: Transport, *, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self.planned_bytes: Counter[Edge] = Counter()
        """Of rows by (source, destination), since the run began."""
        self.moved_bytes: Counter[Edge] = Counter()
        self.header_bytes = 0
        """Sent besides the rows: one short header for each edge of a transfer."""
        self._num_released = 0
        self._outstanding: list[CallRecord] = []

    def need(self, result: RowResult, names: Sequence[str], need: Mapping[int, Ids]) -> None:
        """Make the rows `need[rank]` of the columns `names` arrive everywhere (script thread).

        A rank that needs no rows and has never had the column gets an empty one, from itself.
        """
        alike: dict[int, tuple[list[str], dict[int, Ids]]] = {}  # columns with the same holders
        for name in names:
            held = result.held[name]
            alike.setdefault(id(held), ([], held))[0].append(name)
        rounds: list[dict[tuple[int, int, bytes], tuple[list[str], RowEdge]]] = [{}, {}]
        for columns, held in alike.values():
            unions: dict[tuple[int, int], Ids | None] = {}  # ranks that are alike share theirs
            after: dict[int, Ids] = {}
            for rank, ids in need.items():
                pair = (id(held.get(rank)), id(ids))
                if pair not in unions:
                    unions[pair] = _union_or_none(held.get(rank), ids)
                union = unions[pair]
                if union is not None:
                    after[rank] = union
            lacking = {rank: need[rank] for rank in after}
            found = plan_rounds(held, lacking, node_of=self._transport.node_of)
            found[0] += [RowEdge(rank, rank, ids) for rank, ids in lacking.items() if not len(ids)]
            for edges, planned in zip(rounds, found, strict=False):
                for edge in planned:
                    key = (edge.source, edge.destination, edge.ids.tobytes())
                    edges.setdefault(key, ([], edge))[0].extend(columns)
            result.held |= dict.fromkeys(columns, {**held, **after})
        for edges in filter(None, rounds):
            self._transport.post(partial(self._offer, result, edges))

    def take_outstanding(self) -> list[CallRecord]:
        """Transfers released and not yet waited for; the end of a step waits for them."""
        taken, self._outstanding = self._outstanding, []
        return taken

    def _offer(self, result: RowResult, edges: Edges) -> None:
        """Release a transfer now, or when the rows are made."""
        if result.done:
            self._release(result, edges)
        else:
            result.waiting.append(partial(self._release, result, edges))

    def _release(self, result: RowResult, edges: Edges) -> None:
        """Send the commands."""
        self._num_released += 1
        planned: Counter[Edge] = Counter()
        commands: dict[int, dict[str, Any]] = {}
        kinds = {name: fact.spec.to_plain() for name, fact in result.facts.items()}
        for names, edge in edges.values():
            place = np.searchsorted(result.facts[names[0]].ids, edge.ids)
            lengths, size = {}, 0
            for name in names:
                fact, items = result.facts[name], len(edge.ids)
                if fact.lengths is not None:
                    lengths[name] = fact.lengths[place]
                    items = int(lengths[name].sum())
                size += items * fact.spec.item_bytes
            of_names = {name: kinds[name] for name in names}
            received = [edge.source, names, edge.ids, of_names, lengths]
            _command(commands, edge.destination, result)["receives"].append(received)
            if edge.source != edge.destination:
                sent = [edge.destination, names, edge.ids]
                _command(commands, edge.source, result)["sends"].append(sent)
                planned[edge.source, edge.destination] += size
        self.planned_bytes += planned
        label = f"transfer {self._num_released} of {result.label}"
        number, done = self._num_released, partial(self._count, result, label, planned)
        order = Order(number, "transfer", label, commands, self._seconds, done)
        pending = self._transport.submit(order)
        record = CallRecord(number, label, "train", commands, pending, lane="transfer")
        self._outstanding.append(record)

    def _count(
        self, _kept: RowResult, label: str, planned: Counter[Edge], replies: Replies
    ) -> None:
        """Check and count the bytes. Until here the result is kept: its holders send its rows."""
        sent = {(r, to): n for r, reply in replies.items() for to, n in reply["sent"].items()}
        got = {(at, r): n for r, reply in replies.items() for at, n in reply["received"].items()}
        expected = dict(+planned)
        if not sent == got == expected:
            raise TransferError(
                f"{label}: sent {sent}, received {got}, expected {expected} bytes by edge; "
                f"the ranks and the plan disagree: report this with RUN_DIR/trace.json"
            )
        self.moved_bytes.update(got)
        self.header_bytes += sum(reply["header_bytes"] for reply in replies.values())


def _command(commands: dict[int, dict[str, Any]], rank: int, result: RowResult) -> dict[str, Any]:
    empty = {"operation": "transfer", "result": result.number, "sends": [], "receives": []}
    return commands.setdefault(rank, empty)


def _union_or_none(held: Ids | None, ids: Ids) -> Ids | None:
    """What a rank has after it was given the rows ids; None: it has them all."""
    if held is None:
        return ids
    if held is ids or (len(held) == len(ids) and np.array_equal(held, ids)):
        return None
    return None if np.isin(ids, held).all() else np.union1d(held, ids)
