"""`WeightStream`: carries out a `ReshardPlan` on one rank, bucket by bucket.

What a rank keeps is copied inside it; what it lacks comes in messages of packed boxes, in the
receivers' precision. Works inside one pool and between two. Knows no engine and no generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.errors import WeightSyncError
from spmdflow.hybrid_engine.reshard import Bucket, Message, Part, ReshardPlan
from spmdflow.parallel.group import GroupTable
from spmdflow.weights.move import Block, BlockReader, BlockWriter

BUCKET_BYTES = 64 << 20
"""Bytes that one rank packs, and that reach it, in one bucket."""


class WeightStream:
    """The planned way of a model's weights, as one rank runs it."""

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        rank: int,
        groups: GroupTable,
        dtype: torch.dtype,
        device: torch.device,
        seconds: float,
    ) -> None:
        """groups: has the plan's groups of several ranks; dtype, device: of what travels.

        seconds: limit of one message.
        """
        assert dtype.itemsize == plan.element_bytes, (dtype, plan.element_bytes)
        self.plan, self._rank, self._groups = plan, rank, groups
        self._dtype, self._device, self._limit = dtype, device, timedelta(seconds=seconds)
        self._scope = next((group for group in plan.groups if rank in group), (rank,))

    def run(self, source: Iterable[Block], target: Iterable[Block]) -> int:
        """Write all that this rank needs; source and target are its live views, or none.

        Returns the bytes received. All ranks of a group of the plan run together.
        WeightSyncError if a message does not get through in time.
        """
        reader, writer = BlockReader(source), BlockWriter(target)
        for part in self.plan.kept.get(self._rank, ()):
            writer.write(part.name, part.box, reader.read(part.name, part.box))
        size = self.plan.staging_bytes(self._rank) // self.plan.element_bytes
        staging = torch.empty(size, dtype=self._dtype, device=self._device)
        received = 0
        for bucket in self.plan.buckets:
            for message, values in self._exchange(bucket, reader, staging):
                received += values.nbytes
                _unpack(message.parts, values, writer)
        return received

    def _exchange(
        self, bucket: Bucket, reader: BlockReader, staging: Tensor
    ) -> list[tuple[Message, Tensor]]:
        """Send and receive this rank's messages of a bucket; those received, in staging."""
        arrived: list[tuple[Message, Tensor]] = []
        works: list[tuple[dist.Work, Message]] = []
        start = 0
        for message in bucket.messages_of(self._rank):
            values = staging[start : start + message.num_elements]
            start += message.num_elements
            if message.source == self._rank:
                _pack(message.parts, reader, values)
            else:
                arrived.append((message, values))
            works += [(work, message) for work in self._start(message, values)]
        for work, message in works:
            self._wait(work, message)
        return arrived

    def _start(self, message: Message, values: Tensor) -> list[dist.Work]:
        """A broadcast where a group of just these ranks exists, else point to point."""
        group = self._groups.get_or_none(message.ranks)
        if group is not None:
            work = dist.broadcast(values, src=message.source, group=group, async_op=True)
            return [_started(work)]
        group = self._groups.get(self._scope)
        if message.source != self._rank:
            return [_started(dist.irecv(values, message.source, group=group))]
        return [
            _started(dist.isend(values, destination, group=group))
            for destination in message.destinations
        ]

    def _wait(self, work: dist.Work, message: Message) -> None:
        try:
            work.wait(self._limit)
        except RuntimeError as err:
            names = [part.name for part in message.parts]
            raise WeightSyncError(
                f"weights {names[0]} to {names[-1]}, rank {message.source} to ranks "
                f"{message.destinations}: got nothing through on rank {self._rank}, expected it "
                f"within {self._limit.total_seconds():g} s; look at the logs of those ranks"
            ) from err


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def _pack(parts: Iterable[Part], reader: BlockReader, values: Tensor) -> None:
    """Boxes one behind the other, in the precision of values."""
    with torch.no_grad():
        for part, place in _places(parts, values):
            place.copy_(reader.read(part.name, part.box))


def _unpack(parts: Iterable[Part], values: Tensor, writer: BlockWriter) -> None:
    for part, place in _places(parts, values):
        writer.write(part.name, part.box, place)


def _places(parts: Iterable[Part], values: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Each part and its view, of the box's shape."""
    start = 0
    for part in parts:
        stop = start + part.box.size
        yield part, values[start:stop].view(part.box.shape)
        start = stop
