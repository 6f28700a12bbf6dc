"""Moves rows between ranks according to released plans, in the order of release.

One edge is one header and one message per column. The header has the number of the release and the
bytes of each column, because gloo accepts a message that is too short without an error. The columns
of a small edge travel in one message after the header. The columns of a large edge are sent without
a copy where the rows are contiguous in the store. Does not know roles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""Up to this size, copying the columns into one message costs less than one message per column."""


class CountedTransport:
    """The only place where rows enter or leave a rank: isend and irecv, counted."""

    def __init__(self, group: dist.ProcessGroup | None, *, seconds: float) -> None:
        self._group = group
        self._limit = timedelta(seconds=seconds)
        self._forget()

    def send(
        self, tensor: Tensor, destination: int, tag: int, *, header_bytes: int = 0
    ) -> dist.Work:
        """Start sending a tensor (N,) uint8 to a global rank; return the pending work.

        Counts header_bytes of it as header, and the other bytes as rows sent to the destination.
        Asserts that this rank is in the transfer group.
        """
        self._header_bytes += header_bytes
        self._sent[destination] += tensor.nbytes - header_bytes
        work = dist.isend(tensor, destination, group=self._group, tag=tag)
        assert work is not None, "this rank is not in the transfer group"
        return work

    def receive(self, tensor: Tensor, source: int, tag: int, *, header_bytes: int = 0) -> dist.Work:
        """Start receiving into a tensor (N,) uint8 from a global rank; return the pending work.

        Counts its bytes except header_bytes as rows received from the source. Asserts that this
        rank is in the transfer group.
        """
        self._received[source] += tensor.nbytes - header_bytes
        work = dist.irecv(tensor, source, group=self._group, tag=tag)
        assert work is not None, "this rank is not in the transfer group"
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for one send or receive, within the transfer limit."""
        work.wait(self._limit)

    def take_counts(self) -> dict[str, Any]:
        """Returns and resets the counts: bytes of rows sent and received by peer, bytes of headers
        sent."""
        counts = {
            "sent": dict(+self._sent),  # + omits peers that got no bytes
            "received": dict(+self._received),
            "header_bytes": self._header_bytes,
        }
        self._forget()
        return counts

    def _forget(self) -> None:
        self._sent = Counter[int]()
        self._received = Counter[int]()
        self._header_bytes = 0


def run_release(
    number: int, command: Mapping[str, Any], store: RowStore, transport: CountedTransport
) -> None:
    """Run this rank's part of a release: send its rows, receive rows, and put these into the store.

    Returns once all receives are stored and all sends are done.
    command: from the controller's `Transfers`. It has "result"; "sends", a list of (destination,
    columns, row ids); and "receives", a list of (source, columns, row ids, kinds, lengths), of
    which the last two are by column. An edge without row ids sends no message, but puts empty
    columns into the store, so that the rank knows their kinds. TransferError if a header is not the
    expected one, RowError if rows to send are not in the store.
    """
    result = command["result"]
    incoming = []
    for edge in command["receives"]:
        incoming.append(_Arrival.start(number, edge, transport))
    outgoing = []
    for destination, names, ids in command["sends"]:
        columns = store.take(result, names, ids)
        outgoing += _send(number, destination, list(columns.values()), transport)
    for arrival in incoming:
        arrival.finish(number, transport)
        store.put(result, arrival.ids, arrival.columns)
    for work, _message in outgoing:
        transport.wait(work)


def _send(
    number: int, destination: int, columns: Sequence[Column], transport: CountedTransport
) -> list[tuple[dist.Work, Tensor]]:
    """Start sending the header and the columns of one edge; return each send with its tensor.

    The tensors must live until their sends are done. If the columns have at most 128 KiB together,
    they follow the header in one message. Otherwise each column that is not empty is a message of
    its own, with the header's tag + 1, + 2, ... in the order of the columns.
    """
    messages = [_bytes_of(column) for column in columns]
    head = _header(number, columns)
    tag = _first_tag(number)
    header_bytes = len(head)
    if sum(map(len, messages)) <= _PACKED_BYTES:
        head = torch.cat([head, *messages])
        messages = []
    works = [(transport.send(head, destination, tag, header_bytes=header_bytes), head)]
    for offset, message in enumerate(messages, start=1):
        if len(message):
            work = transport.send(message, destination, tag + offset)
            works.append((work, message))
    return works


@dataclass(frozen=True)
class _Arrival:
    """The receives of one edge, and where its rows are stored."""

    source: int
    ids: np.ndarray
    columns: dict[str, Column]
    works: list[dist.Work]
    head: Tensor
    """The header, followed by the columns of a small edge."""
    is_packed: bool

    @classmethod
    def start(cls, number: int, edge: Sequence[Any], transport: CountedTransport) -> _Arrival:
        """Allocate the columns of one edge, and start receiving its header and columns.

        edge: (source, columns, row ids, kinds, lengths), as in `run_release`. An edge without row
        ids has no messages. Columns of at most 128 KiB together arrive in the header's message, and
        `finish` unpacks them. Larger ones are received directly into place.
        """
        source, names, ids, kinds, lengths = edge
        columns = {}
        for name in names:
            columns[name] = _empty(ColumnSpec.from_plain(kinds[name]), len(ids), lengths.get(name))
        head = _header(number, list(columns.values()))
        if not len(ids):
            return cls(source, ids, columns, [], head, is_packed=False)
        messages = []
        for column in columns.values():
            messages.append(_bytes_of(column))
        tag = _first_tag(number)
        header_bytes = len(head)
        num_packed = sum(map(len, messages))
        is_packed = num_packed <= _PACKED_BYTES
        head = torch.zeros(header_bytes + is_packed * num_packed, dtype=torch.uint8)
        works = [transport.receive(head, source, tag, header_bytes=header_bytes)]
        for offset, message in enumerate([] if is_packed else messages, start=1):
            if len(message):
                works.append(transport.receive(message, source, tag + offset))
        return cls(source, ids, columns, works, head, is_packed)

    def finish(self, number: int, transport: CountedTransport) -> None:
        """Wait for the messages of the edge, check the header, and complete `columns`.

        Unpacks the columns if they came in the header's message. TransferError unless the header
        has the number of this release and the expected bytes of each column.
        """
        for work in self.works:
            transport.wait(work)
        expected = _header(number, list(self.columns.values()))
        got = self.head[: len(expected)]
        if not torch.equal(got, expected):
            raise TransferError(
                f"transfer {number} from rank {self.source}, columns {list(self.columns)}: "
                f"got [number, bytes...] {got.view(torch.int64).tolist()}, expected "
                f"{expected.view(torch.int64).tolist()}; "
                f"the two ranks disagree about the rows: report this with RUN_DIR/trace.json"
            )
        if self.is_packed:
            targets = []
            for column in self.columns.values():
                targets.append(_bytes_of(column))
            parts = self.head[len(expected) :].split([len(target) for target in targets])
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)


def _empty(spec: ColumnSpec, num_rows: int, lengths: np.ndarray | None) -> Column:
    """Return a column of num_rows rows with uninitialised values.

    lengths (num_rows,): items of each row of a ragged or text column, copied. None: it is dense.
    """
    dtype = getattr(torch, spec.dtype)
    if lengths is None:
        return Column("dense", empty_values((num_rows, *spec.row_shape), dtype))
    items = torch.from_numpy(np.ascontiguousarray(lengths, dtype=np.int64).copy())
    return Column(spec.kind, empty_values((int(items.sum()), *spec.row_shape), dtype), items)


def _header(number: int, columns: Sequence[Column]) -> Tensor:
    """(8 * (1 + columns),) uint8: the number of the release and the bytes of each column."""
    sizes = [column.values.nbytes for column in columns]
    return torch.tensor([number, *sizes], dtype=torch.int64).view(torch.uint8)


def _bytes_of(column: Column) -> Tensor:
    """(N,) uint8: the values of a column, without a copy if they are contiguous."""
    return column.values.contiguous().view(-1).view(torch.uint8)


def _first_tag(number: int) -> int:
    """The tag of the header of a release. The columns of an edge use the tags after it."""
    return (number % (1 << 24)) * _TAGS_PER_RELEASE
