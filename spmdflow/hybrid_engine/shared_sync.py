"""`SharedSync`: the generator reads the trainer's shards where they lie (paper section 5.3).

train -> fill (one collective a micro-dp group) -> generate -> free. Nothing is converted: vLLM's
layers work on lists of Megatron's shards (rollout.vllm_blocks).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from spmdflow.hybrid_engine.shared_storage import SharedStorage
from spmdflow.hybrid_engine.sync import WeightSync
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import NEVER
from spmdflow.rollout.vllm import VllmGenerator
from spmdflow.rollout.vllm_blocks import WHOLE, Key, key_of
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import stage_layers
from spmdflow.workers.engine import TrainEngine


class SharedSync(WeightSync):
    """One copy of the weights, in the rows of a `SharedStorage`."""

    def __init__(
        self,
        engine: TrainEngine,
        generator: VllmGenerator,
        storage: SharedStorage,
        *,
        architecture: Architecture,
        vocab_multiple: int,
        verify_every: int,
    ) -> None:
        """storage: adopted by the engine. vocab_multiple: the trainer's padding."""
        super().__init__(engine, generator, verify_every=verify_every)
        self._shared, self._storage = generator, storage
        generator.share(
            shards_of(storage, engine.layout, architecture),
            tp_size=engine.layout.tp_size,
            vocab_multiple=vocab_multiple,
        )
        storage.free()

    def _move(self, version: int) -> int:
        received = self._storage.fill()
        self._shared.shared(version)
        return received

    def release(self) -> None:
        """Free the peers' shards, if they have memory of their own."""
        if self._storage.free():
            self._generator.weights_version = NEVER


def shards_of(
    storage: SharedStorage, layout: Layout, architecture: Architecture
) -> dict[Key, list[Tensor]]:
    """Views by layer and kind, in tensor-parallel order, as `rollout.vllm_blocks` reads them."""
    found: dict[Key, list[Tensor]] = {}
    for member, name, key in _parameters(storage, layout, architecture):
        view = storage.view(member, name)
        if key[1] not in WHOLE:
            found.setdefault(key, []).append(view)
        elif member == storage.own or key not in found:  # the same everywhere: the own if here
            found[key] = [view]
    return found


def _parameters(
    storage: SharedStorage, layout: Layout, architecture: Architecture
) -> Iterator[tuple[int, str, Key]]:
    """(member, Megatron's name, key) of all that generation reads."""
    has_first = any(row.stage == 0 for row in storage.rows)
    for member, row in enumerate(storage.rows):
        layers = stage_layers(architecture.num_layers, pp_size=layout.pp_size, pp_rank=row.stage)
        for name in row.places:
            key = key_of(name, first_layer=layers.start)
            if key != (None, "head") or not architecture.tied:
                yield member, name, key
            elif not has_first:  # the last stage's copy; the first stage's embedding serves both
                yield member, name, (None, "embed")
