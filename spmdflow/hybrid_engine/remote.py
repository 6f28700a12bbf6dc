"""Weights from a policy to a generator on other ranks: the same planner, over both pools.

The policy's ranks send, the generator's receive, in one call that both run. Before the boxes goes
a header of two facts that only the policy knows: the version of its weights and the hash of every
tensor, against which the generator compares what its forward will read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.blocks.hash import MODULUS, to_signed
from spmdflow.hybrid_engine.reshard import boxes_of, plan_reshard, scopes_of
from spmdflow.hybrid_engine.stream import GroupWire, WeightStream
from spmdflow.hybrid_engine.sync import verify_weights
from spmdflow.hybrid_engine.table import generation_tables, training_tables
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import NEVER, Generator
from spmdflow.transfer.worker import Max, Metric, Sum, WorkerContext
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import BUCKET_BYTES
from spmdflow.weights.table import parameters
from spmdflow.workers.engine import TrainEngine


@dataclass(frozen=True)
class _Route:
    """What both ends derive from the two layouts."""

    stream: WeightStream
    names: list[str]
    """Every tensor, in the order of the header's hashes."""
    group: dist.ProcessGroup
    """Over both pools."""
    source: int
    """The policy's first rank, which sends the header."""
    dtype: torch.dtype
    device: torch.device

    def header(self) -> Tensor:
        """Empty: the version, whether hashes follow, the hashes."""
        return torch.zeros(2 + len(self.names), dtype=torch.int64, device=self.device)

    def share(self, header: Tensor) -> None:
        """The policy's first rank tells everyone. Collective over both pools."""
        dist.broadcast(header, src=self.source, group=self.group)


class WeightSender:
    """The policy's end on one rank."""

    def __init__(
        self, engine: TrainEngine, context: WorkerContext, cfg: Any, generation: Layout
    ) -> None:
        """generation: the generator's layout; cfg: the actor's settings, which both share."""
        self._engine, self._every, self._count = engine, cfg.rollout.verify_every, 0
        self._route = _route(context, cfg, training=context.layout, generation=generation)

    def send(self) -> None:
        """Send everything."""
        route, header = self._route, self._route.header()
        header[0] = self._engine.weights_version
        if self._every > 0 and self._count % self._every == 0:
            hashes = self._engine.shard_hashes(route.dtype)
            values = [to_signed(hashes[name]) for name in route.names]
            header[1], header[2:] = 1, torch.tensor(values, device=route.device)
        self._count += 1
        route.share(header)
        route.stream.run(self._engine.blocks(), ())


class WeightReceiver:
    """The generator's end on one rank."""

    def __init__(
        self, generator: Generator, context: WorkerContext, cfg: Any, training: Layout
    ) -> None:
        """training: the policy's layout; cfg: the actor's settings, which both share."""
        self._generator = generator
        self._route = _route(context, cfg, training=training, generation=context.layout)

    def receive(self) -> dict[str, Metric]:
        """Overwrite the generator's weights. WeightSyncError if a hash differs."""
        started, route, generator = time.perf_counter(), self._route, self._generator
        header = route.header()
        route.share(header)
        version, verify, *hashes = header.tolist()
        generator.weights_version = NEVER
        received = route.stream.run((), generator.blocks())
        generator.renew(version)
        if verify:
            values = [value % MODULUS for value in hashes]
            expected = dict(zip(route.names, values, strict=True))
            verify_weights(generator, expected, version)
        return {
            "rollout/synced_bytes": Sum(float(received)),
            "rollout/weights_verified": Max(float(verify)),
            "time/weight_sync_seconds": Max(time.perf_counter() - started),
        }


def _route(context: WorkerContext, cfg: Any, *, training: Layout, generation: Layout) -> _Route:
    architecture = Architecture.from_folder(cfg.model.path)
    dtype = getattr(torch, cfg.rollout.dtype)
    plan = plan_reshard(
        boxes_of(training_tables(architecture, training, kind=cfg.engine.kind)),
        boxes_of(generation_tables(architecture, generation, engine=cfg.rollout.engine)),
        scopes=scopes_of(training, generation),
        element_bytes=dtype.itemsize,
        bucket_bytes=BUCKET_BYTES,
    )
    stream = WeightStream(
        plan,
        rank=context.rank,
        wire=GroupWire(context.groups, plan, rank=context.rank),
        dtype=dtype,
        device=context.device,
        seconds=context.call_seconds,
    )
    names = [parameter.name for parameter in parameters(architecture)]
    group = context.groups.get(plan.ranks)
    return _Route(stream, names, group, training.ranks[0], dtype, context.device)
