"""Plans what rows travel, releases each transfer when its producer has replied, counts bytes.

`need` runs in the script thread and keeps the account of who holds what; releasing runs in the
io thread, which alone knows dtypes and lengths. The two never touch the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from spmdflow.blocks.rows import RowEdge, plan_rounds
from spmdflow.controller.result import CallRecord, RowResult
from spmdflow.data.row_id import Ids
from spmdflow.errors import TransferError
from spmdflow.runtime.order import Order, Transport

Edge = tuple[int, int]


@dataclass
class EdgeBytes:
    """Planned and moved row bytes by (source, destination), since the run began."""

    planned: dict[Edge, int] = field(default_factory=dict)
    moved: dict[Edge, int] = field(default_factory=dict)
    header_bytes: int = 0
    """Sent besides the rows: one short header for each edge of a transfer."""

    def total(self, which: str) -> int:
        """Sum over edges of "planned" or "moved"."""
        return sum(getattr(self, which).values())


@dataclass(frozen=True)
class _PlannedEdge:
    source: int
    destination: int
    columns: tuple[str, ...]
    ids: Ids


@dataclass(frozen=True)
class _Transfer:
    result: RowResult
    edges: tuple[_PlannedEdge, ...]


class Transfers:
    """All row transfers of a run."""

    def __init__(self, transport: Transport, *, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self.bytes = EdgeBytes()
        self._num_released = 0
        self._outstanding: list[CallRecord] = []

    def need(self, result: RowResult, names: Sequence[str], need: Mapping[int, Ids]) -> None:
        """Make the rows `need[rank]` of the columns `names` arrive everywhere (script thread).

        A rank that needs no rows and has never had the column gets an empty one, from itself.
        """
        rounds: list[dict[tuple[int, int, bytes], tuple[list[str], RowEdge]]] = [{}, {}]
        for columns, held in _by_holders(result, names):
            unions: dict[tuple[int, int], Ids | None] = {}
            for rank, ids in need.items():
                pair = (id(held.get(rank)), id(ids))
                if pair not in unions:
                    unions[pair] = _union_or_none(held.get(rank), ids)
            joined = {rank: unions[id(held.get(rank)), id(ids)] for rank, ids in need.items()}
            after = {rank: ids for rank, ids in joined.items() if ids is not None}
            lacking = {rank: need[rank] for rank in after}
            found = plan_rounds(held, lacking, node_of=self._transport.node_of)
            found[0] += [RowEdge(rank, rank, ids) for rank, ids in lacking.items() if not len(ids)]
            for edges, planned in zip(rounds, found, strict=False):
                for edge in planned:
                    key = (edge.source, edge.destination, edge.ids.tobytes())
                    edges.setdefault(key, ([], edge))[0].extend(columns)
            result.held |= dict.fromkeys(columns, {**held, **after})
        for edges in filter(None, rounds):
            transfer = _Transfer(
                result,
                tuple(
                    _PlannedEdge(edge.source, edge.destination, tuple(columns), edge.ids)
                    for columns, edge in edges.values()
                ),
            )
            self._transport.post(partial(self._offer, transfer))

    def take_outstanding(self) -> list[CallRecord]:
        """Transfers released and not yet waited for; the end of a step waits for them."""
        taken, self._outstanding = self._outstanding, []
        return taken

    def producer_done(self, result: RowResult) -> None:
        """Release what waited for this result (io thread; facts are set)."""
        result.done = True
        waiting, result.waiting = result.waiting, []
        for transfer in waiting:
            self._release(transfer)

    def _offer(self, transfer: _Transfer) -> None:
        if transfer.result.done:
            self._release(transfer)
        else:
            transfer.result.waiting.append(transfer)

    def _release(self, transfer: _Transfer) -> None:
        """Send the commands."""
        self._num_released += 1
        result = transfer.result
        planned: dict[Edge, int] = {}
        commands: dict[int, dict[str, Any]] = {}
        specs = {name: fact.spec.to_plain() for name, fact in result.facts.items()}
        for edge in transfer.edges:
            lengths = _lengths(edge, result)
            destination = _command(commands, edge.destination, result.number)
            kinds = {name: specs[name] for name in edge.columns}
            plain = [edge.source, list(edge.columns), edge.ids, kinds, lengths]
            destination["receives"].append(plain)
            if edge.source == edge.destination:
                continue
            size = _num_bytes(edge, result, lengths)
            key = (edge.source, edge.destination)
            planned[key] = planned.get(key, 0) + size
            self.bytes.planned[key] = self.bytes.planned.get(key, 0) + size
            source = _command(commands, edge.source, result.number)
            source["sends"].append([edge.destination, list(edge.columns), edge.ids])
        label = f"transfer {self._num_released} of {result.label}"
        order = Order(
            number=self._num_released,
            lane="transfer",
            label=label,
            commands=commands,
            seconds=self._seconds,
            on_done=partial(self._count, result, label, planned),
        )
        pending = self._transport.submit(order)
        record = CallRecord(self._num_released, label, "transfer", pending, lane="transfer")
        self._outstanding.append(record)

    def _count(
        self,
        _kept: RowResult,
        label: str,
        planned: Mapping[Edge, int],
        replies: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Check and count the bytes. Until here the result is kept: its holders send its rows."""
        sent = {(r, to): n for r, reply in replies.items() for to, n in reply["sent"].items()}
        got = {(at, r): n for r, reply in replies.items() for at, n in reply["received"].items()}
        expected = {edge: size for edge, size in planned.items() if size}
        if not sent == got == expected:
            raise TransferError(
                f"{label}: sent {sent}, received {got}, expected {expected} bytes by edge; "
                f"the ranks and the plan disagree: report this with RUN_DIR/trace.json"
            )
        self.bytes.header_bytes += sum(reply["header_bytes"] for reply in replies.values())
        for edge, size in got.items():
            self.bytes.moved[edge] = self.bytes.moved.get(edge, 0) + size


def _command(commands: dict[int, dict[str, Any]], rank: int, result: int) -> dict[str, Any]:
    empty = {"operation": "transfer", "result": result, "sends": [], "receives": []}
    return commands.setdefault(rank, empty)


def _lengths(edge: _PlannedEdge, result: RowResult) -> dict[str, np.ndarray]:
    """Items of the edge's rows, by ragged or text column."""
    lengths: dict[str, np.ndarray] = {}
    place: np.ndarray | None = None
    for name in edge.columns:
        fact = result.facts[name]
        if fact.lengths is not None:
            if place is None:  # the columns of a result have the same rows
                place = np.searchsorted(fact.ids, edge.ids)
            lengths[name] = fact.lengths[place]
    return lengths


def _num_bytes(edge: _PlannedEdge, result: RowResult, lengths: Mapping[str, np.ndarray]) -> int:
    size = 0
    for name in edge.columns:
        items = int(lengths[name].sum()) if name in lengths else len(edge.ids)
        size += items * result.facts[name].spec.item_bytes
    return size


def _by_holders(result: RowResult, names: Sequence[str]) -> list[tuple[list[str], dict[int, Ids]]]:
    """Columns that the same ranks hold, together."""
    groups: dict[int, tuple[list[str], dict[int, Ids]]] = {}
    for name in names:
        held = result.held[name]
        groups.setdefault(id(held), ([], held))[0].append(name)
    return list(groups.values())


def _union_or_none(held: Ids | None, ids: Ids) -> Ids | None:
    """What a rank has after it was given the rows ids; None: it has them all."""
    if held is None:
        return ids
    if held is ids or (len(held) == len(ids) and np.array_equal(held, ids)):
        return None
    return None if np.isin(ids, held).all() else np.union1d(held, ids)
