"""`WholeTensors`: Hugging Face tensors, whole, out of the shards of many ranks, a chunk at a time.

For those who know a model by its checkpoint: an engine of another program, a file. Each chunk has
a plan of its own, so that a rank holds one chunk at a time and nobody gathers what it does not
need: ranks that only train send their boxes, straight to where the tensors are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.hybrid_engine.reshard import BoxesByRank, ReshardPlan, plan_reshard
from spmdflow.hybrid_engine.stream import WeightStream, Wire
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block
from spmdflow.weights.ranks import BUCKET_BYTES
from spmdflow.weights.table import Parameter, parameters


class WholeTensors:
    """One rank's part in bringing a model's tensors to `targets`."""

    def __init__(
        self,
        arch: Architecture,
        have: BoxesByRank,
        targets: tuple[int, ...],
        wire_of: Callable[[ReshardPlan], Wire],
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        seconds: float,
        chunk_bytes: int = BUCKET_BYTES,
    ) -> None:
        """have: what every rank trains with; targets: ranks that want whole tensors.

        chunk_bytes: whole tensors at a time (or one that is larger), equal on all ranks; the
        staging buffer beside them is not larger. dtype, device: of the tensors. seconds: limit of
        one message.
        """
        self._wanted, self.dtype, self._device = rank in targets, dtype, device
        everyone = tuple(sorted({*have, *targets}))
        self._chunks = []
        for chunk in _chunks(parameters(arch), chunk_bytes // dtype.itemsize):
            whole = {each.name: (Box.of_shape(each.shape),) for each in chunk}
            plan = plan_reshard(
                have,
                dict.fromkeys(targets, whole),
                scopes={"pool": [everyone]},
                element_bytes=dtype.itemsize,
                bucket_bytes=chunk_bytes,
            )
            stream = WeightStream(
                plan, rank=rank, wire=wire_of(plan), dtype=dtype, device=device, seconds=seconds
            )
            self._chunks.append((chunk, stream))

    def received_bytes_of(self, rank: int) -> int:
        """Bytes that reach a rank each time."""
        return sum(stream.plan.received_bytes(rank) for _, stream in self._chunks)

    def run(self, source: Iterable[Block]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) in the model's order on a target; elsewhere tensors are empty.

        source: this rank's live views, or none. All ranks run together, to the end.
        WeightSyncError if a message does not get through in time.
        """
        held = list(source)
        for chunk, stream in self._chunks:
            shapes = {each.name: each.shape if self._wanted else (0,) for each in chunk}
            made = {name: self._empty(shape) for name, shape in shapes.items()}
            target = [(name, tensor, Box.of_shape(tensor.shape)) for name, tensor in made.items()]
            stream.run(held, target if self._wanted else ())
            yield from made.items()
            del made, target  # before the next chunk is there

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device)


def _chunks(tensors: Iterable[Parameter], limit: int) -> Iterator[list[Parameter]]:
    """Neighbours of at most limit elements together, or one."""
    chunk: list[Parameter] = []
    size = 0
    for each in tensors:
        more = Box.of_shape(each.shape).size
        if chunk and size + more > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(each)
        size += more
    if chunk:
        yield chunk
