"""`WholeTensors`: Hugging Face tensors, whole, out of the shards of many ranks, a chunk at a time.

For those who know a model by its checkpoint: an engine of another program, a file. Each chunk has
a plan of its own, so that a rank holds one chunk at a time and nobody gathers what it does not
need: ranks that only train send their boxes, straight to where the tensors are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.hybrid_engine.reshard import (
    BoxesByRank,
    ReshardPlan,
    plan_reshard,
    with_shared_tables,
)
from spmdflow.hybrid_engine.stream import WeightStream, Wire
from spmdflow.weights.move import Block
from spmdflow.weights.ranks import BUCKET_BYTES

Shape = tuple[str, Sequence[int]]
"""A tensor's Hugging Face name and its whole shape."""


class WholeTensors:
    """One rank's part in bringing a model's tensors to those that want them."""

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
        """have: what every rank trains with; wanted: by rank, the tensors that it gets, in order.

        chunk_bytes: whole tensors of a rank at a time (or one that is larger), equal on all ranks;
        the staging buffer beside them is not larger. dtype, device: of the tensors. seconds: limit
        of one message.
        """
        self._device, self.dtype = device, dtype
        self._chunks: list[tuple[Sequence[Shape], WeightStream]] = []
        everyone = tuple(sorted({*have, *wanted}))
        chunks = (_chunks(tensors, chunk_bytes // dtype.itemsize) for tensors in wanted.values())
        for row in zip_longest(*chunks, fillvalue=[]):
            some = dict(zip(wanted, row, strict=True))
            need = {
                target: {name: (Box.of_shape(shape),) for name, shape in tensors}
                for target, tensors in some.items()
            }
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
        """Bytes that reach a rank each time."""
        return sum(stream.plan.received_bytes(rank) for _, stream in self._chunks)

    def run(self, source: Iterable[Block]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of those that this rank wants, in order.

        source: this rank's live views, or none. All ranks run together, to the end.
        WeightSyncError if a message does not get through in time.
        """
        held = list(source)
        for chunk, stream in self._chunks:
            made = {n: torch.empty(x, dtype=self.dtype, device=self._device) for n, x in chunk}
            stream.run(held, [(name, x, Box.of_shape(x.shape)) for name, x in made.items()])
            yield from made.items()
            del made  # before the next chunk is there


def _chunks(tensors: Iterable[Shape], limit: int) -> Iterator[list[Shape]]:
    """Neighbours of at most limit elements together, or one."""
    chunk: list[Shape] = []
    size = 0
    for name, shape in tensors:
        more = Box.of_shape(shape).size
        if chunk and size + more > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, shape))
        size += more
    if chunk:
        yield chunk
