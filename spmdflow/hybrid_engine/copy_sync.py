"""Two copies of the weights: the generator has its own, in its own layout and precision.

Works with every train engine and every generator. `CopySync` gathers each tensor whole on every
rank, which is what data-parallel shards amount to when every rank generates by itself.
`StreamSync` sends each rank the boxes that it lacks.
"""

from __future__ import annotations

from collections.abc import Iterable

from spmdflow.hybrid_engine.stream import WeightStream
from spmdflow.hybrid_engine.sync import WeightSync
from spmdflow.rollout.generator import Generator
from spmdflow.weights.move import Block
from spmdflow.workers.engine import TrainEngine


class CopySync(WeightSync):
    """Whole tensors, one at a time, by the engine's own all-gather."""

    def _move(self, version: int) -> int:
        return self._generator.load(self._engine.full_tensors(), version=version)


class StreamSync(WeightSync):
    """Boxes by the planner, in buckets."""

    def __init__(
        self,
        engine: TrainEngine,
        generator: Generator,
        stream: WeightStream,
        *,
        verify_every: int,
        frees_generator: bool = False,
    ) -> None:
        """stream: planned from the engine's blocks to the generator's."""
        super().__init__(
            engine, generator, verify_every=verify_every, frees_generator=frees_generator
        )
        self._stream = stream

    def _move(self, version: int) -> int:
        def fill(target: Iterable[Block]) -> int:
            return self._stream.run(self._engine.blocks(), target)

        return self._generator.overwrite(fill, version=version)
