"""`WeightStream` executes a `ReshardPlan` on one rank, bucket by bucket. `WholeTensors` assembles
complete Hugging Face tensors from the shards of many ranks, a chunk at a time.

Boxes that a rank both has and needs are copied locally. Missing ones arrive in messages of packed
boxes, in the receivers' precision. A large box travels alone, directly from and into the live
tensors where it is contiguous there. Works within one pool and between two. Knows no engine and no
generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import zip_longest
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import WeightSyncError
from spmdflow.hybrid_engine.bucket import BoxPart, Message
from spmdflow.hybrid_engine.reshard import (
    BoxesByRank,
    ReshardPlan,
    plan_reshard,
    with_shared_tables,
)
from spmdflow.parallel.group import GroupTable
from spmdflow.weights.move import Block, Blocks
from spmdflow.weights.ranks import BUCKET_BYTES

ALONE_BYTES = 1 << 20
"""A box of at least this size is not packed with others."""
_Transfer = tuple[Message, Tensor | None]
"""A message, and the live values that it is sent from or to. None: it uses the staging buffer."""


class Wire(Protocol):
    """How one rank sends and receives messages."""

    def start(self, transfers: Sequence[tuple[Message, Tensor]]) -> list[dist.Work]:
        """Starts to send values (1-D, contiguous) if this rank is a message's source, otherwise to
        receive them. Returns the work to wait for."""


class GroupWire:
    """A wire over the process groups of a job."""

    def __init__(self, groups: GroupTable, plan: ReshardPlan, *, rank: int) -> None:
        """groups: contains the plan's groups of more than one rank."""
        self._groups = groups
        self._rank = rank
        self._scope = next((group for group in plan.groups if rank in group), (rank,))

    def start(self, transfers: Sequence[tuple[Message, Tensor]]) -> list[dist.Work]:
        """Starts all transfers of this rank, and returns the works to wait for.

        A message is broadcast if a process group of exactly its ranks exists. The others are sent
        point to point, as one batch over the group of the scope.
        """
        works: list[dist.Work | None] = []
        batch: list[dist.P2POp] = []
        scope = self._groups.get_or_none(self._scope)
        for message, values in transfers:
            group = self._groups.get_or_none(message.ranks)
            if group is not None:
                works.append(dist.broadcast(values, message.source, group=group, async_op=True))
            elif message.source != self._rank:
                batch.append(dist.P2POp(dist.irecv, values, message.source, scope))
            else:
                batch += [dist.P2POp(dist.isend, values, to, scope) for to in message.destinations]
        works += dist.batch_isend_irecv(batch) if batch else []
        assert None not in works, "this rank is not in the group"
        result = []
        for work in works:
            if work is not None:
                result.append(work)
        return result


class WeightStream:
    """One rank's part in a plan that moves a model's weights."""

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        rank: int,
        wire: Wire,
        dtype: torch.dtype,
        device: torch.device,
        seconds: float,
        alone_bytes: int = ALONE_BYTES,
    ) -> None:
        """wire: transports the plan's messages. dtype, device: of the messages.

        seconds: limit of one message. alone_bytes: equal on all ranks.
        """
        assert dtype.itemsize == plan.element_bytes, (dtype, plan.element_bytes)
        self.plan = plan
        self._rank = rank
        self._wire = wire
        self._dtype = dtype
        self._device = device
        self._limit = timedelta(seconds=seconds)
        self._alone = alone_bytes // dtype.itemsize

    def run(self, source: Iterable[Block], target: Iterable[Block]) -> int:
        """Writes all weights that this rank needs into `target`. Returns the bytes received.

        Boxes that the rank has are copied first, then the buckets are exchanged in order. source,
        target: its live views, or none. All ranks of a group of the plan run together.
        WeightSyncError if a message does not arrive in time.
        """
        reader = Blocks(source)
        writer = Blocks(target)
        for part in self.plan.local_parts(self._rank):
            for values, box in reader.pieces(part.name, part.box):
                writer.write(part.name, box, values)
        planned = self.plan.messages_of(self._rank)
        buckets = []
        for some in planned:
            buckets.append(list(self._transfers(some, reader, writer)))
        sizes = []
        for bucket in buckets:
            sizes.append(sum(m.num_elements for m, live in bucket if live is None))
        staging = torch.empty(max(sizes, default=0), dtype=self._dtype, device=self._device)
        return sum(self._exchange(bucket, staging, reader, writer) for bucket in buckets)

    def _exchange(
        self, bucket: list[_Transfer], staging: Tensor, reader: Blocks, writer: Blocks
    ) -> int:
        """Sends and receives the messages of a bucket. Returns the bytes received.

        Messages without live values use consecutive parts of `staging`: the sender packs them from
        `reader`, or from `writer` if they are relayed, and the receiver writes them to `writer`
        when all have arrived.
        """
        transfers: list[tuple[Message, Tensor]] = []
        arrived: list[tuple[Message, Tensor]] = []
        used = received = 0
        for message, live in bucket:
            sends = message.source == self._rank
            values = live
            if values is None:
                values = staging[used : used + message.num_elements]
                used += message.num_elements
                if sends:
                    _pack(message.parts, writer if message.relayed else reader, values)
                else:
                    arrived.append((message, values))
            received += 0 if sends else values.nbytes
            transfers.append((message, values))
        for work in self._wire.start(transfers):
            self._wait(work, transfers)
        for message, values in arrived:
            for part, view in _split_parts(message.parts, values):
                writer.write(part.name, part.box, view)
        return received

    def _transfers(
        self, messages: Iterable[Message], reader: Blocks, writer: Blocks
    ) -> Iterator[_Transfer]:
        """Yields this rank's messages, split in the same way at both ends.

        Each box of at least self._alone elements is a message of its own, with its live values if
        they can be sent or received in place, otherwise None. The small boxes of a message follow
        together, with None.
        """
        for message in messages:
            view = writer.view if message.relayed else reader.view
            view = view if message.source == self._rank else writer.sole_view
            small = tuple(part for part in message.parts if part.box.size < self._alone)
            for part in message.parts:
                if part.box.size >= self._alone:
                    live = self._in_place(view(part.name, part.box))
                    yield replace(message, parts=(part,)), live
            if small:
                yield replace(message, parts=small), None

    def _in_place(self, values: Tensor | None) -> Tensor | None:
        """The live values of a box, flat. None if they are not contiguous or must be converted."""
        if values is None or not values.is_contiguous():
            return None
        fits = values.dtype == self._dtype and values.device == self._device
        if fits:
            return values.view(-1)
        return None

    def _wait(self, work: dist.Work, transfers: Sequence[tuple[Message, Tensor]]) -> None:
        """Waits for one work of a bucket. WeightSyncError if it does not end within the limit.

        transfers: those of the bucket, whose tensors and ranks are in the error.
        """
        try:
            work.wait(self._limit)
        except RuntimeError as err:
            names = []
            for message, _ in transfers:
                for part in message.parts:
                    names.append(part.name)
            ranks = sorted({rank for message, _ in transfers for rank in message.ranks})
            raise WeightSyncError(
                f"weights {names[0]} to {names[-1]} among ranks {ranks}: nothing arrived on "
                f"rank {self._rank}, expected it within {self._limit.total_seconds():g} s; look at "
                f"the logs of those ranks"
            ) from err


def _pack(parts: Iterable[BoxPart], reader: Blocks, values: Tensor) -> None:
    """Copies boxes one after the other into values (1-D), in the precision of values."""
    with torch.no_grad():
        for part, target in _split_parts(parts, values):
            for values_of_box, box in reader.pieces(part.name, part.box):
                target[box.slices(part.box)].copy_(values_of_box)


def _split_parts(parts: Iterable[BoxPart], values: Tensor) -> Iterator[tuple[BoxPart, Tensor]]:
    """Each part and its view of values, in the shape of its box."""
    start = 0
    for part in parts:
        stop = start + part.box.size
        yield part, values[start:stop].view(part.box.shape)
        start = stop


Shape = tuple[str, Sequence[int]]
"""A tensor's Hugging Face name and its complete shape."""


class WholeTensors:
    """Brings complete Hugging Face tensors to the ranks that want them.

    For consumers that know a model by its checkpoint: an engine of another program, a file. Each
    chunk has its own plan, so that a rank holds one chunk at a time and receives only what it
    needs: ranks that only train send their boxes directly to the ranks that want the tensors.
    """

    def __init__(
        self,
        have: BoxesByRank,
        wanted: Mapping[int, Sequence[Shape]],
        wire_of: Callable[[ReshardPlan], Wire],
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        seconds: float,
        chunk_bytes: int = BUCKET_BYTES,
    ) -> None:
        """have: the boxes that every rank trains. wanted: by rank, the tensors that it gets, in
        order.

        chunk_bytes: size of the complete tensors that a rank has at a time (or one larger tensor),
        equal on all ranks. The additional staging buffer is not larger. dtype, device: of the
        tensors. seconds: limit of one message.
        """
        self._device = device
        self.dtype = dtype
        self._chunks: list[tuple[Sequence[Shape], WeightStream]] = []
        everyone = tuple(sorted({*have, *wanted}))
        chunks = (_chunks(tensors, chunk_bytes // dtype.itemsize) for tensors in wanted.values())
        for row in zip_longest(*chunks, fillvalue=[]):
            some = dict(zip(wanted, row, strict=True))
            need = {}
            for target, tensors in some.items():
                need[target] = {name: (Box.of_shape(shape),) for name, shape in tensors}
            plan = plan_reshard(
                have,
                with_shared_tables(need),
                scopes={"pool": [everyone]},
                element_bytes=dtype.itemsize,
                bucket_bytes=chunk_bytes,
            )
            stream = WeightStream(
                plan, rank=rank, wire=wire_of(plan), dtype=dtype, device=device, seconds=seconds
            )
            self._chunks.append((some.get(rank, ()), stream))

    def received_bytes_of(self, rank: int) -> int:
        """Bytes that a rank receives in each run."""
        return sum(stream.plan.received_bytes(rank) for _, stream in self._chunks)

    def run(self, source: Iterable[Block]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, complete tensor) of each tensor that this rank wants, in order.

        All ranks run together, and each must consume the iterator to its end. source: this rank's
        live views, or none. WeightSyncError if a message does not arrive in time.
        """
        blocks = list(source)
        for chunk, stream in self._chunks:
            tensors = {}
            for n, x in chunk:
                tensors[n] = torch.empty(x, dtype=self.dtype, device=self._device)
            stream.run(blocks, [(name, x, Box.of_shape(x.shape)) for name, x in tensors.items()])
            yield from tensors.items()
            del tensors  # before the next chunk is allocated


def _chunks(tensors: Iterable[Shape], limit: int) -> Iterator[list[Shape]]:
    """Runs of tensors with at most `limit` elements together. A larger tensor is alone."""
    chunk: list[Shape] = []
    size = 0
    for name, shape in tensors:
        more = Box.of_shape(shape).size
        if chunk and size + more > limit:
            yield chunk
            chunk = []
            size = 0
        chunk.append((name, shape))
        size += more
    if chunk:
        yield chunk
