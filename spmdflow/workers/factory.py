"""Builds the train engine that a role's settings name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from spmdflow.kind.engine import EngineKind, engine_kind, load
from spmdflow.transfer.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine
from spmdflow.workers.hugging_face import (
    LoadedModel,
    load_causal_lm,
    load_critic_model,
    load_scalar_model,
)
from spmdflow.workers.model_source import ModelSource, open_model

_HEADS = {
    "causal_lm": load_causal_lm,
    "scalar": load_scalar_model,
    "critic": load_critic_model,
}


def engine_of(
    cfg: Any,
    context: WorkerContext,
    *,
    head: str,
    adopt: Callable[..., None] | None = None,
) -> TrainEngine:
    """The engine `cfg.engine.kind` with the weights of cfg.model.

    head: causal_lm (logits), scalar (a trained one-label head) or critic (a zero head if the
    folder has none). With `cfg.optimizer` it can train. adopt: where the weights of an engine
    that shares its storage lie (megatron_optimizer.Adopt). Collective over the pool.
    """
    kind = engine_kind(cfg.engine.kind, key=f"{context.name}.engine.kind")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron names every extra that is not installed
        engine_class = load(kind.implementation)
    engine: TrainEngine = engine_class(
        _model_of(cfg, kind, head=head),
        cfg.engine,
        context,
        optimizer=getattr(cfg, "optimizer", None),
        total_optimizer_steps=_total_optimizer_steps(cfg, context),
        **({} if adopt is None else {"adopt": adopt}),
    )
    return engine


def _model_of(cfg: Any, kind: EngineKind, *, head: str) -> LoadedModel | ModelSource:
    """A module to shard, or a folder to read boxes from where the engine has its own modules."""
    if kind.reads_folder:
        return open_model(cfg.model, head=head)
    return _HEADS[head](cfg.model)


def _total_optimizer_steps(cfg: Any, context: WorkerContext) -> int:
    """Optimizer steps of the whole run, for schedules that end with it."""
    update = getattr(cfg, "update", None)
    if update is None or not update.samples_per_step:
        return context.total_steps
    mini_batches = -(-update.samples_per_step // update.mini_batch_size)
    return context.total_steps * update.num_epochs * mini_batches
