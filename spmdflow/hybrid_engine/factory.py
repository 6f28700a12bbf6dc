"""Chooses how weights get from trainer to generator, and builds the parts that this needs."""

from __future__ import annotations

from typing import Any

from spmdflow.config.parallel import obstacle_to_shared_weights, shared_weights_error
from spmdflow.hybrid_engine.shared_storage import SharedStorage
from spmdflow.hybrid_engine.sync import BoxSync, SharedSync, WeightSync
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import Generator
from spmdflow.rollout.vllm import VllmGenerator
from spmdflow.weights.architecture import Architecture
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine


def sync_mode(cfg: Any, layout: Layout) -> str:
    """Returns how weights reach the generator: blocks, flat, copy or adapter.

    The setting is rollout.weights of an actor's settings (cfg). auto becomes blocks if trainer and
    generator can share their weights (`_obstacle`), otherwise copy. On devices, the plan has
    already replaced auto. ConfigError if the setting is blocks or flat and they cannot.
    """
    setting = cfg.rollout.weights
    if setting in ("copy", "adapter"):
        return str(setting)
    obstacle = _obstacle(cfg, layout)
    if setting == "auto":
        return "blocks" if obstacle is None else "copy"
    if obstacle is not None:
        raise shared_weights_error("actor", setting, obstacle)
    return str(setting)


def storage_of(mode: str, context: WorkerContext) -> SharedStorage | None:
    """Returns the storage that trainer and generator will share; None if each has its own.

    There is none in the modes copy and adapter. Otherwise it is over the ranks of this rank's
    gen_parts group, and flat in the mode flat.
    """
    if mode in ("copy", "adapter"):
        return None
    layout = context.layout
    rank = context.rank
    ranks = layout.axis_group(rank, "gen_parts")
    group = context.groups.get(ranks) if len(ranks) > 1 else None
    stage = layout.coordinate(rank).pp
    return SharedStorage(ranks, rank, group, stage=stage, is_flat=mode == "flat")


def hybrid_of(
    engine: TrainEngine,
    generator: Generator,
    context: WorkerContext,
    cfg: Any,
    *,
    storage: SharedStorage | None,
) -> WeightSync:
    """Builds the weight sync of this trainer and generator; all ranks of the pool call it together.

    With a shared storage this is a SharedSync, whose generator must be a VllmGenerator, otherwise a
    BoxSync.
    """
    every = cfg.rollout.verify_every
    if storage is not None:
        assert isinstance(generator, VllmGenerator)
        architecture = Architecture.from_folder(cfg.model.path)
        return SharedSync(engine, generator, storage, architecture, verify_every=every)
    return BoxSync(
        engine,
        generator,
        rank=context.rank,
        seconds=context.groups.timeout_seconds,
        verify_every=every,
        node=context.node_of(context.rank),
    )


def _obstacle(cfg: Any, layout: Layout) -> str | None:
    """Returns why trainer and generator cannot share weights, or None if they can.

    Both must have the same layout of weights in memory and the same dtype, without virtual pipeline
    stages, and each generation replica must be inside one training replica.
    """
    obstacle = obstacle_to_shared_weights(
        cfg, has_virtual_stages=layout.virtual_size > 1, nests=layout.nests
    )
    if obstacle is not None:
        return obstacle
    if not Architecture.sizes_from_folder(cfg.model.path).is_dense:
        return "the generator stores experts in another form"
    return None
