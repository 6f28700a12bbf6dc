"""`WeightStream`: carries out a `ReshardPlan` on one rank, bucket by bucket.

What a rank keeps is copied inside it; what it lacks comes in messages of packed boxes, in the
receivers' precision. Works inside one pool and between two. Knows no engine and no generator.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        received = 0
        for bucket in self.plan.buckets:
            for message, values in self._exchange(bucket, reader):
                received += values.nbytes
                _unpack(message.parts, values, writer)
        return received

    def _exchange(self, bucket: Bucket, reader: BlockReader) -> list[tuple[Message, Tensor]]:
        """Send and receive this rank's messages of a bucket; those received."""
        arrived: list[tuple[Message, Tensor]] = []
        works: list[tuple[dist.Work, Message, Tensor]] = []
        for message in bucket.messages_of(self._rank):
            if message.source == self._rank:
                values = self._packed(message.parts, reader)
            else:
                size = message.num_elements
                values = torch.empty(size, dtype=self._dtype, device=self._device)
                arrived.append((message, values))
            works += [(work, message, values) for work in self._start(message, values)]
        for work, message, _kept in works:
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

    def _packed(self, parts: Iterable[Part], reader: BlockReader) -> Tensor:
        boxes = [reader.read(part.name, part.box).reshape(-1) for part in parts]
        return torch.cat([box.to(self._device, self._dtype) for box in boxes])

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


def _unpack(parts: Iterable[Part], values: Tensor, writer: BlockWriter) -> None:
    start = 0
    for part in parts:
        stop = start + part.box.size
        writer.write(part.name, part.box, values[start:stop].view(part.box.shape))
        start = stop
