"""`WeightSync`: a trainer, its generator, and the comparison of their checksums.

The comparison does not trust the copy: the trainer hashes its shards where they lie, rounded to
the generator's precision; the generator hashes the tensors its forward reads. Both hashes depend
on every bit and its place (blocks.hash), so a wrong, stale, shifted or skipped tensor shows.
`BoxSync` keeps two copies; `SharedSync` has the generator read the trainer's shards where they lie
(paper section 5.3). Knows no engine by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from spmdflow.errors import WeightSyncError
from spmdflow.hybrid_engine.reshard import (
    BoxesByRank,
    ReshardPlan,
    boxes_by_name,
    plan_reshard,
    scopes_of,
    shapes_of,
)
from spmdflow.hybrid_engine.shared_storage import SharedStorage
from spmdflow.hybrid_engine.stream import GroupWire, WeightStream
from spmdflow.kind.generator import generator_names
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import NEVER, Generator
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm import VllmGenerator
from spmdflow.rollout.vllm_blocks import WHOLE, Key, key_of
from spmdflow.transfer.worker import Max, Metric, Sum
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import BUCKET_BYTES
from spmdflow.weights.table import stage_layers
from spmdflow.workers.engine import TrainEngine

logger = logging.getLogger(__name__)


class WeightSync:
    """A train engine and the generator that must have its weights."""

    def __init__(
        self,
        engine: TrainEngine,
        generator: Generator,
        *,
        verify_every: int,
        frees_generator: bool = False,
    ) -> None:
        """verify_every: the first sync and every n-th after it compare hashes; 0: none does.

        frees_generator: `release` gives back the memory of the generator's own weights.
        """
        self._engine, self._generator = engine, generator
        self._verify_every, self._num_syncs = verify_every, 0
        self._frees_generator = frees_generator

    def _move(self, version: int) -> int:
        """Bring the trainer's weights to the generator; bytes that this rank received."""
        raise NotImplementedError

    def release(self) -> None:
        """Free what only generation needs, as far as this way can; training comes next."""
        if self._frees_generator:
            self._generator.sleep(weights=True)

    @property
    def needs_sync(self) -> bool:
        """Whether the trainer's weights have changed since the last sync; equal on all ranks."""
        return self._generator.weights_version != self._engine.weights_version

    def sync(self) -> dict[str, Metric]:
        """Bring every weight to the generator; all ranks of the engine call it.

        WeightSyncError if a tensor did not fit or arrive, or if a hash differs; the generator
        then counts as never synced.
        """
        start, version = time.perf_counter(), self._engine.weights_version
        verify = self._verify_every > 0 and self._num_syncs % self._verify_every == 0
        self._generator.weights_version = NEVER
        num_bytes = self._move(version)
        if verify:
            expected = self._engine.shard_hashes(self._generator.dtype)
            verify_weights(self._generator, expected, version)
        self._num_syncs += 1
        seconds = time.perf_counter() - start
        logger.debug("synced weights of version %d, verified: %s", version, verify)
        return {
            "rollout/weights_version": Max(float(version)),
            "rollout/weights_verified": Max(float(verify)),
            "rollout/synced_bytes": Sum(float(num_bytes)),
            "time/weight_sync_seconds": Max(seconds),
        }

    def generate(self, prompts: Tensor, sampling: Sampling, seeds: Sequence[int]) -> TensorDict:
        """As Generator.generate; WeightSyncError while needs_sync is true."""
        if self.needs_sync:
            held = self._generator.weights_version
            raise WeightSyncError(
                f"generate: got a generator with {_version_text(held)} while the trainer is at "
                f"version {self._engine.weights_version}; expected the same version; call sync() "
                f"on every rank of the actor first"
            )
        return self._generator.generate(prompts, sampling, seeds)


class BoxSync(WeightSync):
    """Two copies of the weights: each rank receives the boxes that its generator lacks."""

    def __init__(
        self,
        engine: TrainEngine,
        generator: Generator,
        *,
        rank: int,
        seconds: float,
        verify_every: int,
        frees_generator: bool = False,
    ) -> None:
        """rank: this one; seconds: limit of one message. All ranks of the engine together.

        WeightSyncError if trainer and generator are of different models.
        """
        super().__init__(
            engine, generator, verify_every=verify_every, frees_generator=frees_generator
        )
        plan = self._plan()
        self._stream = WeightStream(
            plan,
            rank=rank,
            wire=GroupWire(engine.groups, plan, rank=rank),
            dtype=generator.dtype,
            device=engine.device,
            seconds=seconds,
        )

    def _plan(self) -> ReshardPlan:
        """From what every rank has to what it needs; the ranks tell one another, collective."""
        layout = self._engine.layout
        mine = boxes_by_name(self._engine.blocks()), boxes_by_name(self._generator.blocks())
        found = [mine] * layout.size
        if layout.size > 1:
            dist.all_gather_object(found, mine, group=self._engine.groups.get(layout.ranks))
        have = {rank: has for rank, (has, _) in zip(layout.ranks, found, strict=True)}
        need = {rank: needs for rank, (_, needs) in zip(layout.ranks, found, strict=True)}
        _check_same_model(have, need)
        return plan_reshard(
            have,
            need,
            scopes=scopes_of(layout, layout),
            element_bytes=self._generator.dtype.itemsize,
            bucket_bytes=BUCKET_BYTES,
        )

    def _move(self, version: int) -> int:
        received = self._stream.run(self._engine.blocks(), self._generator.blocks())
        self._generator.renew(version)
        return received


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


def _check_same_model(have: BoxesByRank, need: BoxesByRank) -> None:
    """WeightSyncError names the tensors that only one side has, or in another shape."""
    trained, generates = shapes_of(have), shapes_of(need)
    names = sorted(trained.keys() | generates.keys())
    wrong = [name for name in names if trained.get(name) != generates.get(name)]
    if wrong:
        name = wrong[0]
        raise WeightSyncError(
            f"weights: got rollout tensor {name} of shape {generates.get(name)}, expected the "
            f"trainer's {trained.get(name)} ({len(wrong)} tensors differ: {wrong[:5]}); give "
            f"trainer and generator the same model.path"
        )


def verify_weights(generator: Generator, expected: Mapping[str, int], version: int) -> None:
    """Compare every tensor's hash; a collective over the replica.

    WeightSyncError if one differs; the generator then counts as never synced.
    """
    try:
        compare(expected, generator.hashes(), version)
    except WeightSyncError:
        generator.weights_version = NEVER
        raise


def compare(expected: Mapping[str, int], found: Mapping[str, int], version: int) -> None:
    """WeightSyncError naming the first tensor whose hash differs between trainer and generator."""
    wrong = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    if wrong:
        raise WeightSyncError(_mismatch_text(wrong, expected, found, version))


def _mismatch_text(
    wrong: Sequence[str], expected: Mapping[str, int], found: Mapping[str, int], version: int
) -> str:
    name = wrong[0]
    others = f" and {len(wrong) - 1} more ({', '.join(wrong[1:4])})" if wrong[1:] else ""
    return (
        f"weight sync of version {version}: got rollout tensor {name} with hash "
        f"{_hash_text(found, name)}, expected the trainer's {_hash_text(expected, name)}{others}, "
        f"of {len(expected)} tensors; the run must not go on with these weights: set "
        f"actor.rollout.engine={generator_names()[0]} to see whether it is the "
        f"generator, and report this message"
    )


def _hash_text(hashes: Mapping[str, int], name: str) -> str:
    return f"{hashes[name]:#018x}" if name in hashes else "absent"


def _version_text(version: int) -> str:
    return "weights that were never synced" if version == NEVER else f"weights of version {version}"
