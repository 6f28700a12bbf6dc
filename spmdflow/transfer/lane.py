"""Moves rows between ranks, as a released plan says. Runs in release order. Knows no roles.

One edge is one header and one message a column. The header carries the release number and each
column's bytes, because gloo takes a short message without an error. The columns of a small edge
travel in one message, behind the header; of a large one, whole stretches of a stored column are
sent without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.data.column import Column, ColumnSpec, empty_values
from spmdflow.data.store import RowStore
from spmdflow.errors import TransferError

_TAGS_PER_RELEASE = 64
_PACKED_BYTES = 1 << 17
"""Up to here, copying the columns into one message costs less than one message each."""


@dataclass
class ByteCounter:
    """Bytes this rank sent and received, rows and headers apart."""

    sent: dict[int, int] = field(default_factory=dict)
    """Row bytes by destination rank."""
    received: dict[int, int] = field(default_factory=dict)
    """Row bytes by source rank."""
    header_bytes: int = 0
    """Bytes of headers sent."""


class CountedTransport:
    """The only place where rows enter or leave a rank: isend and irecv, counted."""

    def __init__(self, group: dist.ProcessGroup | None, *, seconds: float) -> None:
        self._group, self._limit = group, timedelta(seconds=seconds)
        self.counter = ByteCounter()

    def send(
        self, tensor: Tensor, destination: int, tag: int, *, header_bytes: int = 0
    ) -> dist.Work:
        """Start sending bytes (N,) uint8 to a global rank; header_bytes of them are no rows."""
        self.counter.header_bytes += header_bytes
        _add(self.counter.sent, destination, tensor.nbytes - header_bytes)
        work = dist.isend(tensor, destination, group=self._group, tag=tag)
        assert work is not None, "this rank is not in the transfer group"
        return work

    def receive(self, tensor: Tensor, source: int, tag: int, *, header_bytes: int = 0) -> dist.Work:
        """Start receiving bytes (N,) uint8 from a global rank; header_bytes are no rows."""
        _add(self.counter.received, source, tensor.nbytes - header_bytes)
        work = dist.irecv(tensor, source, group=self._group, tag=tag)
        assert work is not None, "this rank is not in the transfer group"
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for one send or receive, within the transfer limit."""
        work.wait(self._limit)

    def take_counter(self) -> ByteCounter:
        """What was counted since the last call; starts a new count."""
        taken, self.counter = self.counter, ByteCounter()
        return taken


def _add(by_peer: dict[int, int], peer: int, num_bytes: int) -> None:
    if num_bytes:
        by_peer[peer] = by_peer.get(peer, 0) + num_bytes


@dataclass(frozen=True)
class Send:
    """Rows `ids` of `columns` go to `destination`."""

    destination: int
    columns: tuple[str, ...]
    ids: np.ndarray


@dataclass(frozen=True)
class Receive:
    """Rows `ids` of `columns` come from `source`; specs and lengths say how many bytes.

    Without ids nothing comes: the rank is told what its empty columns look like.
    """

    source: int
    columns: tuple[str, ...]
    ids: np.ndarray
    specs: Mapping[str, ColumnSpec]
    lengths: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Release:
    """This rank's part of one released transfer of one result."""

    number: int
    result: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]

    @classmethod
    def from_plain(cls, number: int, plain: Mapping[str, Any]) -> Release:
        """Read the command that the controller sent."""
        sends = tuple(Send(to, tuple(names), ids) for to, names, ids in plain["sends"])
        receives = tuple(
            Receive(source, tuple(names), ids, _specs(specs), lengths)
            for source, names, ids, specs, lengths in plain["receives"]
        )
        return cls(number, plain["result"], sends, receives)


def _specs(plain: Mapping[str, Sequence[Any]]) -> dict[str, ColumnSpec]:
    return {name: ColumnSpec.from_plain(spec) for name, spec in plain.items()}


def run_release(release: Release, store: RowStore, transport: CountedTransport) -> None:
    """Send and receive this rank's edges; returns when all rows are in the store."""
    incoming = [_post_receive(edge, release.number, transport) for edge in release.receives]
    outgoing = [
        work for edge in release.sends for work in _post_send(edge, release, store, transport)
    ]
    for edge, arrival in zip(release.receives, incoming, strict=True):
        for work in arrival.works:
            transport.wait(work)
        arrival.check(edge, release.number)
        arrival.unpack()
        store.put(release.result, edge.ids, arrival.columns)
    for work, _kept in outgoing:
        transport.wait(work)


def _post_send(
    edge: Send, release: Release, store: RowStore, transport: CountedTransport
) -> list[tuple[dist.Work, Tensor]]:
    columns = store.take(release.result, edge.columns, edge.ids)
    messages = [_bytes_of(columns[name].values) for name in edge.columns]
    head = _header(release.number, [len(message) for message in messages])
    tag, header_bytes = _first_tag(release.number), len(head)
    if sum(map(len, messages)) <= _PACKED_BYTES:
        head, messages = torch.cat([head, *messages]), []
    works = [(transport.send(head, edge.destination, tag, header_bytes=header_bytes), head)]
    for place, message in enumerate(messages, start=1):
        if len(message):
            works.append((transport.send(message, edge.destination, tag + place), message))
    return works


@dataclass(frozen=True)
class _Arrival:
    """Receives under way for one edge, and where what comes is put."""

    works: list[dist.Work]
    head: Tensor
    """The header, and behind it the columns of a small edge."""
    columns: dict[str, Column]
    is_packed: bool = False

    def check(self, edge: Receive, number: int) -> None:
        """TransferError unless the header names this transfer and the bytes that were expected."""
        got = self.head[: _header_bytes(edge)].view(torch.int64).tolist()
        expected = [number, *(column.values.nbytes for column in self.columns.values())]
        if got != expected:
            raise TransferError(
                f"transfer {number} from rank {edge.source}, columns {list(edge.columns)}: "
                f"got [number, bytes...] {got}, expected {expected}; "
                f"the two ranks disagree about the rows: report this with RUN_DIR/trace.json"
            )

    def unpack(self) -> None:
        """Put the columns of a small edge where they belong."""
        if self.is_packed:
            targets = [_bytes_of(column.values) for column in self.columns.values()]
            sizes = [len(target) for target in targets]
            parts = self.head[len(self.head) - sum(sizes) :].split(sizes)
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)


def _post_receive(edge: Receive, number: int, transport: CountedTransport) -> _Arrival:
    columns = {name: _empty(edge, name) for name in edge.columns}
    if not len(edge.ids):  # no rows: nobody sends, only the columns' kinds are news
        return _Arrival([], _header(number, [0] * len(columns)), columns)
    messages = [_bytes_of(column.values) for column in columns.values()]
    tag, header_bytes = _first_tag(number), _header_bytes(edge)
    num_packed = sum(map(len, messages))
    is_packed = num_packed <= _PACKED_BYTES
    head = torch.zeros(header_bytes + is_packed * num_packed, dtype=torch.uint8)
    works = [transport.receive(head, edge.source, tag, header_bytes=header_bytes)]
    for place, message in enumerate([] if is_packed else messages, start=1):
        if len(message):
            works.append(transport.receive(message, edge.source, tag + place))
    return _Arrival(works, head, columns, is_packed)


def _empty(edge: Receive, name: str) -> Column:
    spec = edge.specs[name]
    dtype = getattr(torch, spec.dtype)
    if spec.kind == "dense":
        return Column("dense", empty_values((len(edge.ids), *spec.row_shape), dtype))
    lengths = torch.from_numpy(np.ascontiguousarray(edge.lengths[name], dtype=np.int64).copy())
    values = empty_values((int(lengths.sum()), *spec.row_shape), dtype)
    return Column(spec.kind, values, lengths)


def _header(number: int, sizes: Sequence[int]) -> Tensor:
    return torch.tensor([number, *sizes], dtype=torch.int64).view(torch.uint8)


def _header_bytes(edge: Receive) -> int:
    return 8 * (1 + len(edge.columns))


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _first_tag(number: int) -> int:
    return (number % (1 << 24)) * _TAGS_PER_RELEASE
