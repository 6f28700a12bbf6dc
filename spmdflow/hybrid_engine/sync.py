"""Weights from a trainer to its generator, on the same ranks or on others, and their checksums.

The comparison does not trust the copy: the trainer hashes its own shards, rounded to the
generator's precision, and the generator hashes the tensors that its forward reads. Both hashes
depend on every bit and its position (blocks.hash), so they detect a wrong, stale, shifted or
skipped tensor.

`BoxSync` has two copies. With `SharedSync` the generator reads the trainer's shards in place (paper
section 5.3). A `WeightSender` on the policy's ranks and a `WeightReceiver` on the generator's run
in the same call. A header precedes the boxes: the version of the weights and the hash of every
tensor, which only the policy knows. Knows no engine by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from spmdflow.blocks.hash import MODULUS, to_signed
from spmdflow.errors import WeightSyncError
from spmdflow.hybrid_engine.reshard import (
    BoxesByRank,
    ReshardPlan,
    boxes_by_name,
    moved_boxes,
    plan_boxes,
    plan_copies,
    plan_reshard,
    scopes_of,
    sent_architecture,
    with_shared_tables,
)
from spmdflow.hybrid_engine.shared_storage import SharedStorage
from spmdflow.hybrid_engine.stream import GroupWire, WeightStream
from spmdflow.kind.generator import generator_names
from spmdflow.parallel.group import all_gather_plain
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import NEVER, Generator
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm import VllmGenerator
from spmdflow.rollout.vllm_blocks import is_whole, vllm_names
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block
from spmdflow.weights.ranks import BUCKET_BYTES, SHARED_EMBEDDING, default_vocab_multiple
from spmdflow.weights.table import parameters
from spmdflow.worker_api.metric import Max, Metric, Sum
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine

logger = logging.getLogger(__name__)


class WeightSync:
    """A train engine and the generator that must have its weights."""

    def __init__(self, engine: TrainEngine, generator: Generator, *, verify_every: int) -> None:
        """verify_every: the first sync and every n-th after it compare hashes. 0: none does."""
        self._engine = engine
        self._generator = generator
        self._verify_every = verify_every
        self.num_syncs = 0
        self._is_first = True

    def _move(self, version: int) -> int:
        """Brings the trainer's weights to the generator. Returns the bytes that this rank
        received."""
        raise NotImplementedError

    def release(self) -> None:
        """Frees the memory that only generation needs, as far as possible, before training."""
        self._generator.sleep(weights=True)

    @property
    def needs_sync(self) -> bool:
        """Whether the trainer's weights have changed since the last sync. Equal on all ranks."""
        return self._generator.weights_version != self._engine.weights_version

    def sync(self) -> dict[str, Metric]:
        """Brings all weights to the generator; all ranks of the engine call it together.

        Returns metrics. Compares the hashes of all tensors in the first sync of this object and in
        every verify_every-th one (0: never). WeightSyncError if a tensor does not fit or arrive, or
        if a hash differs. The generator then counts as never synced.
        """
        start = time.perf_counter()
        version = self._engine.weights_version
        is_due = self._is_first or self.num_syncs % max(1, self._verify_every) == 0
        verify = self._verify_every > 0 and is_due
        self._generator.weights_version = NEVER
        self._engine.settle()
        num_bytes = self._move(version)
        if verify:
            expected = self._engine.shard_hashes(self._generator.dtype)
            _verify(self._generator, expected, version)
        self.num_syncs = self.num_syncs + 1
        self._is_first = False
        seconds = time.perf_counter() - start
        logger.debug("synced weights of version %d, verified: %s", version, verify)
        return {
            "rollout/weights_version": Max(float(version)),
            "rollout/weights_verified": Max(float(verify)),
            "rollout/synced_bytes": Sum(float(num_bytes)),
            "time/weight_sync_seconds": Max(seconds),
        }

    def generate(self, prompts: Tensor, sampling: Sampling, seeds: Sequence[int]) -> TensorDict:
        """Generates on weights of the current version; see Generator.generate.

        WeightSyncError while needs_sync is true.
        """
        if self.needs_sync:
            version = self._generator.weights_version
            if version == NEVER:
                weights = "that were never synced"
            else:
                weights = f"of version {version}"
            raise WeightSyncError(
                f"generate: got a generator with weights {weights} while the trainer is at "
                f"version {self._engine.weights_version}; expected the same version; call sync() "
                f"on every rank of the actor first"
            )
        return self._generator.generate(prompts, sampling, seeds)


class BoxSync(WeightSync):
    """Two copies of the weights. Each rank receives the boxes that its generator lacks."""

    def __init__(
        self,
        engine: TrainEngine,
        generator: Generator,
        *,
        rank: int,
        seconds: float,
        verify_every: int,
        node: int = 0,
    ) -> None:
        """Plans the copies. All ranks of the engine build it together.

        rank: this rank. node: its node. seconds: limit of one message. WeightSyncError if trainer
        and generator have different models.
        """
        super().__init__(engine, generator, verify_every=verify_every)
        plan = self._plan(node, rank)
        self._stream = WeightStream(
            plan,
            rank=rank,
            wire=GroupWire(engine.groups, plan, rank=rank),
            dtype=generator.dtype,
            device=engine.device,
            seconds=seconds,
        )

    def _plan(self, node: int, rank: int) -> ReshardPlan:
        """Gathers the boxes that every rank has and needs, and plans the copies (collective).

        WeightSyncError if trainer and generator have different tensors or shapes.
        """
        layout = self._engine.layout
        own_boxes = (
            boxes_by_name(self._engine.blocks()),
            boxes_by_name(self._generator.blocks()),
            node,
        )
        boxes_of_ranks = self._engine.from_all(own_boxes)
        *sides, nodes = (
            dict(zip(layout.ranks, side)) for side in zip(*boxes_of_ranks, strict=True)
        )
        _check_same_model(*sides)
        have, need = (with_shared_tables(moved_boxes(side)) for side in sides)
        return plan_reshard(
            have,
            need,
            scopes=scopes_of(layout, layout),
            element_bytes=self._generator.dtype.itemsize,
            bucket_bytes=BUCKET_BYTES,
            node_of=nodes.__getitem__,
            rank=rank,
        )

    def _move(self, version: int) -> int:
        """Copies the boxes, and gives the generator this version. Returns the bytes received.

        These include what this rank received to merge adapters.
        """
        gathered = self._engine.gathered_bytes
        received = self._stream.run(self._engine.blocks(), self._generator.blocks())
        self._generator.renew(version)
        return received + self._engine.gathered_bytes - gathered


class SharedSync(WeightSync):
    """One copy of the weights, in the rows of a `SharedStorage`."""

    def __init__(
        self,
        engine: TrainEngine,
        generator: VllmGenerator,
        storage: SharedStorage,
        architecture: Architecture,
        *,
        verify_every: int,
    ) -> None:
        """storage: already adopted by the engine."""
        super().__init__(engine, generator, verify_every=verify_every)
        self._shared = generator
        self._storage = storage
        tp_size = engine.layout.tp_size
        generator.share(
            _shards_of(storage, engine.layout, architecture),
            tp_size=tp_size,
            vocab_multiple=default_vocab_multiple(tp_size),
        )
        storage.free()

    def _move(self, version: int) -> int:
        received = self._storage.fill()
        self._shared.mark_shared(version)
        return received

    def release(self) -> None:
        """Frees the peers' shards, if they have separate memory."""
        if self._storage.free():
            self._generator.weights_version = NEVER


class _CrossPoolCopy:
    """State that sender and receiver of a cross-pool weight copy share."""

    def __init__(
        self,
        context: WorkerContext,
        cfg: Any,
        *,
        training: Layout,
        generation: Layout,
        blocks: Iterable[Block],
    ) -> None:
        """cfg: the actor's settings, which both ends have (Any: a role's dataclass). blocks: those
        that this rank sends or receives. All ranks of both pools build it together."""
        self._dtype = getattr(torch, cfg.rollout.precision)
        self._device = context.device
        facts: dict[str, Any] = {
            "training": training,
            "generation": generation,
            "itemsize": self._dtype.itemsize,
            "node_of": context.node_of,
            "rank": context.rank,
        }
        if not Architecture.sizes_from_folder(cfg.model.path).is_dense_with_table:
            have, need = _boxes_of_pools(context, training, generation, blocks)
            plan = plan_boxes(have, need, **facts).plan
            self._names = sorted(_shapes_of(have))
        else:
            architecture = sent_architecture(cfg)
            plan = plan_copies(architecture, cfg, **facts).plan
            self._names = [parameter.name for parameter in parameters(architecture)]
        self._stream = WeightStream(
            plan,
            rank=context.rank,
            wire=GroupWire(context.groups, plan, rank=context.rank),
            dtype=self._dtype,
            device=context.device,
            seconds=context.groups.timeout_seconds,
        )
        self._group = context.groups.get(plan.ranks)
        self._source = training.ranks[0]

    def _broadcast_header(self, header: Sequence[int] = ()) -> list[int]:
        """Broadcasts the header from the policy's first rank, and returns it (collective).

        All ranks of both pools call it together. The header is [version, 1 if hashes follow, hash
        of each tensor as int64]. header: its beginning on the policy's ranks, padded with zeros;
        only the first rank's counts. Empty on the generator's.
        """
        numbers = torch.zeros(2 + len(self._names), dtype=torch.int64, device=self._device)
        if header:
            numbers[: len(header)] = torch.tensor(header)
        dist.broadcast(numbers, src=self._source, group=self._group)
        return numbers.tolist()


class WeightSender(_CrossPoolCopy):
    """The policy's end of a cross-pool copy, on one rank."""

    def __init__(
        self, engine: TrainEngine, context: WorkerContext, cfg: Any, generation: Layout
    ) -> None:
        """generation: the generator's layout; cfg: the actor's settings."""
        super().__init__(
            context,
            cfg,
            training=context.layout,
            generation=generation,
            blocks=engine.blocks(),
        )
        self._engine = engine
        self._every = cfg.rollout.verify_every
        self._count = 0

    def send(self) -> dict[str, Metric]:
        """Sends the header and all boxes; all ranks of policy and generator call it together.

        The header has the tensors' hashes in the first call and every verify_every-th after it (0:
        never). Returns metrics.
        """
        started = time.perf_counter()
        header = [self._engine.weights_version]
        if self._every > 0 and self._count % self._every == 0:
            hashes = self._engine.shard_hashes(self._dtype)
            header += [1, *(to_signed(hashes[name]) for name in self._names)]
        self._count += 1
        self._broadcast_header(header)
        gathered = self._engine.gathered_bytes
        self._stream.run(self._engine.blocks(), ())
        received = self._engine.gathered_bytes - gathered
        return {
            "rollout/synced_bytes": Sum(float(received)),
            "time/weight_sync_seconds": Max(time.perf_counter() - started),
        }


class WeightReceiver(_CrossPoolCopy):
    """The generator's end of a cross-pool copy, on one rank."""

    def __init__(
        self, generator: Generator, context: WorkerContext, cfg: Any, training: Layout
    ) -> None:
        """training: the policy's layout; cfg: the actor's settings."""
        super().__init__(
            context,
            cfg,
            training=training,
            generation=context.layout,
            blocks=generator.blocks(),
        )
        self._generator = generator

    def receive(self) -> dict[str, Metric]:
        """Overwrites the generator's weights, while the policy's ranks `send`. Returns metrics.

        The generator gets the policy's version. If the header has hashes, they are compared;
        WeightSyncError if one differs, and the generator then counts as never synced.
        """
        generator = self._generator
        version, verify, *hashes = self._broadcast_header()
        # begins here: before the header comes, this rank may wait for a policy that still trains
        started = time.perf_counter()
        generator.weights_version = NEVER
        received = self._stream.run((), generator.blocks())
        generator.renew(version)
        if verify:
            values = [value % MODULUS for value in hashes]
            _verify(generator, dict(zip(self._names, values, strict=True)), version)
        return {
            "rollout/synced_bytes": Sum(float(received)),
            "rollout/weights_verified": Max(float(verify)),
            "time/weight_sync_seconds": Max(time.perf_counter() - started),
        }


def _boxes_of_pools(
    context: WorkerContext, training: Layout, generation: Layout, blocks: Iterable[Block]
) -> tuple[BoxesByRank, BoxesByRank]:
    """Return the boxes that the ranks of a policy have, and those that its generator's need.

    For models without a table of weights: the ranks of both pools tell each other, together.
    blocks: this rank's. WeightSyncError if the two have different tensors or shapes.
    """
    ranks = tuple(sorted({*training.ranks, *generation.ranks}))
    group = context.groups.get(ranks, backend="gloo")
    boxes = dict(zip(ranks, all_gather_plain(boxes_by_name(blocks), group), strict=True))
    have = {rank: boxes[rank] for rank in training.ranks}
    need = {rank: boxes[rank] for rank in generation.ranks}
    _check_same_model(have, need)
    return with_shared_tables(have), with_shared_tables(need)


def _shards_of(
    storage: SharedStorage, layout: Layout, architecture: Architecture
) -> dict[str, list[Tensor]]:
    """Returns vLLM parameter -> views of the training shards, in tensor-parallel order.

    A tensor that every rank has completely gives one view, from this rank's own row if that has it.
    The last stage's copy of a tied embedding is skipped if the group has the first stage.
    """
    has_first = any(row.stage == 0 for row in storage.rows)
    views: dict[str, list[Tensor]] = {}
    for member, row in enumerate(storage.rows):
        names = vllm_names(architecture, pp_size=layout.pp_size, pp_rank=row.stage)
        for local_name in row.locations:
            if architecture.tied and has_first and local_name == SHARED_EMBEDDING[1]:
                continue  # a copy of the first stage's embedding, which both use
            name = names[local_name]
            view = storage.view(member, local_name)
            if not is_whole(name):
                views.setdefault(name, []).append(view)
            elif (
                member == storage.own or name not in views
            ):  # equal on all members: prefer the own one
                views[name] = [view]
    return views


def _check_same_model(have: BoxesByRank, need: BoxesByRank) -> None:
    """WeightSyncError with the tensors that only one side has, or that differ in shape."""
    trained = _shapes_of(have)
    generates = _shapes_of(need)
    names = sorted(trained.keys() | generates.keys())
    wrong = [name for name in names if trained.get(name) != generates.get(name)]
    if wrong:
        name = wrong[0]
        raise WeightSyncError(
            f"weights: got rollout tensor {name} of shape {generates.get(name)}, expected the "
            f"trainer's {trained.get(name)} ({len(wrong)} tensors differ: {wrong[:5]}); give "
            f"trainer and generator the same model.path"
        )


def _shapes_of(boxes: BoxesByRank) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor: the largest end of its boxes in each dimension.

    boxes: those of all ranks, which together cover every tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, box in ((n, box) for table in boxes.values() for n in table for box in table[n]):
        ends = tuple(stop for _, stop in box.bounds)
        shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
    return shapes


def _verify(generator: Generator, expected: Mapping[str, int], version: int) -> None:
    """Compares every tensor's hash. A collective over the replica.

    WeightSyncError if one differs. The generator then counts as never synced.
    """
    try:
        compare_hashes(expected, generator.hashes(), version)
    except WeightSyncError:
        generator.weights_version = NEVER
        raise


def compare_hashes(expected: Mapping[str, int], actual: Mapping[str, int], version: int) -> None:
    """WeightSyncError with the first tensor, by name, whose hash differs or that one side lacks.

    version: of the weights, for the error.
    """
    names = sorted(expected.keys() | actual.keys())
    wrong = []
    for name in names:
        if expected.get(name) != actual.get(name):
            wrong.append(name)
    if not wrong:
        return
    got, wanted = (
        f"{hashes[wrong[0]]:#018x}" if wrong[0] in hashes else "absent"
        for hashes in (actual, expected)
    )
    if wrong[1:]:
        others = f" and {len(wrong) - 1} more ({', '.join(wrong[1:4])})"
    else:
        others = ""
    raise WeightSyncError(
        f"weight sync of version {version}: got rollout tensor {wrong[0]} with hash {got}, "
        f"expected the trainer's {wanted}{others}, of {len(expected)} tensors; the run must not "
        f"continue with these weights: set actor.rollout.engine={generator_names()[0]} to see "
        f"whether the generator is the cause, and report this message"
    )
