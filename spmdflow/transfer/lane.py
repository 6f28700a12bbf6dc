"""Moves rows between ranks, as a released plan says: one edge, one header, one message a column.

Runs in the transfer lane, in release order. Knows no roles. The header carries the release
number and each column's bytes, because gloo takes a short message without an error. Whole
stretches of a stored column are sent without a copy.
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

from spmdflow.data.column import Column, ColumnSpec
from spmdflow.data.store import RowStore
from spmdflow.errors import TransferError

_TAGS_PER_RELEASE = 64


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

    def send(self, tensor: Tensor, destination: int, tag: int, *, header: bool) -> dist.Work:
        """Start sending bytes (N,) uint8 to a global rank."""
        if header:
            self.counter.header_bytes += tensor.nbytes
        else:
            _add(self.counter.sent, destination, tensor)
        work = dist.isend(tensor, destination, group=self._group, tag=tag)
        assert work is not None, "this rank is not in the transfer group"
        return work

    def receive(self, tensor: Tensor, source: int, tag: int, *, header: bool) -> dist.Work:
        """Start receiving bytes (N,) uint8 from a global rank."""
        if not header:
            _add(self.counter.received, source, tensor)
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


def _add(by_peer: dict[int, int], peer: int, tensor: Tensor) -> None:
    by_peer[peer] = by_peer.get(peer, 0) + tensor.nbytes


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
    """This rank's part of one released transfer of one frame."""

    number: int
    frame: int
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
        return cls(number, plain["frame"], sends, receives)


def _specs(plain: Mapping[str, Sequence[Any]]) -> dict[str, ColumnSpec]:
    return {name: ColumnSpec.from_plain(spec) for name, spec in plain.items()}


def run_release(release: Release, store: RowStore, transport: CountedTransport) -> None:
    """Send and receive this rank's edges; returns when all rows are in the store."""
    incoming = [_post_receive(edge, release.number, transport) for edge in release.receives]
    outgoing = [
        work for edge in release.sends for work in _post_send(edge, release, store, transport)
    ]
    for edge, (works, header, columns) in zip(release.receives, incoming, strict=True):
        for work in works:
            transport.wait(work)
        _check_header(edge, release.number, header, columns)
        store.put(release.frame, edge.ids, columns)
    for work, _kept in outgoing:
        transport.wait(work)


def _post_send(
    edge: Send, release: Release, store: RowStore, transport: CountedTransport
) -> list[tuple[dist.Work, Tensor]]:
    columns = store.take(release.frame, edge.columns, edge.ids)
    messages = [_bytes_of(columns[name].values) for name in edge.columns]
    header = _header(release.number, [len(message) for message in messages])
    tag = _first_tag(release.number)
    works = [(transport.send(header, edge.destination, tag, header=True), header)]
    for place, message in enumerate(messages, start=1):
        if len(message):
            work = transport.send(message, edge.destination, tag + place, header=False)
            works.append((work, message))
    return works


def _post_receive(
    edge: Receive, number: int, transport: CountedTransport
) -> tuple[list[dist.Work], Tensor, dict[str, Column]]:
    tag = _first_tag(number)
    if not len(edge.ids):  # no rows: nobody sends, only the columns' kinds are news
        header = _header(number, [0] * len(edge.columns))
        return [], header, {name: _empty(edge, name) for name in edge.columns}
    header = _header(0, [0] * len(edge.columns))
    works = [transport.receive(header, edge.source, tag, header=True)]
    columns = {}
    for place, name in enumerate(edge.columns, start=1):
        columns[name] = column = _empty(edge, name)
        message = _bytes_of(column.values)
        if len(message):
            works.append(transport.receive(message, edge.source, tag + place, header=False))
    return works, header, columns


def _empty(edge: Receive, name: str) -> Column:
    spec = edge.specs[name]
    dtype = getattr(torch, spec.dtype)
    if spec.kind == "dense":
        return Column("dense", torch.empty(len(edge.ids), *spec.row_shape, dtype=dtype))
    lengths = torch.from_numpy(np.ascontiguousarray(edge.lengths[name], dtype=np.int64).copy())
    values = torch.empty(int(lengths.sum()), *spec.row_shape, dtype=dtype)
    return Column(spec.kind, values, lengths)


def _check_header(edge: Receive, number: int, header: Tensor, columns: dict[str, Column]) -> None:
    got = header.view(torch.int64).tolist()
    expected = [number, *(columns[name].values.nbytes for name in edge.columns)]
    if got != expected:
        raise TransferError(
            f"transfer {number} from rank {edge.source}, columns {list(edge.columns)}: "
            f"got [number, bytes...] {got}, expected {expected}; "
            f"the two ranks disagree about the rows: report this with RUN_DIR/trace.json"
        )


def _header(number: int, sizes: Sequence[int]) -> Tensor:
    return torch.tensor([number, *sizes], dtype=torch.int64).view(torch.uint8)


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _first_tag(number: int) -> int:
    return (number % (1 << 24)) * _TAGS_PER_RELEASE
