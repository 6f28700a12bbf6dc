"""Shared parts of roles with a train engine: building it, scoring rows, stepping, state on disk.

A role that derives from `EngineWorker` runs on the engine that its settings name (engine.kind).
`FSDPWorker`, `ZeROWorker` and `ThreeDParallelWorker` (the paper's 3DParallelWorker, section 4.1)
fix the engine: `class MyCritic(FSDPWorker)` is a new role, `class MyActor(ZeROWorker, ActorWorker)`
the actor on ZeRO. A class may also combine roles that have the same head: `class
MyActor(ActorWorker, PreferenceWorker)` is one model with the methods of both. If both define a
method, the first base class wins, as in any Python class.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDict
from torch import Tensor

from spmdflow.checkpoint.disk import disk_errors
from spmdflow.checkpoint.export import ModelExport
from spmdflow.checkpoint.state import StateFiles
from spmdflow.checkpoint.tensors import HostCopies, write_state
from spmdflow.config.parallel import generation_sizes, training_sizes
from spmdflow.config.schema import EngineConfig
from spmdflow.data.ragged import select_rows
from spmdflow.errors import CheckpointError, ConfigError
from spmdflow.kind.engine import engine_kind, engines_of
from spmdflow.objectives.loss import Loss
from spmdflow.parallel.layout import Layout
from spmdflow.tracking.metric import merge
from spmdflow.weights.adapter import ALL_LINEAR, is_adapter
from spmdflow.weights.architecture import Architecture
from spmdflow.worker_api.metric import Metric
from spmdflow.worker_api.worker import Worker, WorkerContext, any_layout
from spmdflow.workers.engine import (
    EMPTY,
    NONFINITE,
    Part,
    Place,
    TrainEngine,
    engine_of,
    planned_steps,
)
from spmdflow.workers.micro_batch import MicroBatch

logger = logging.getLogger(__name__)

_MUCH_OF_PLAN = 0.9
"""A run logs at its end if it took fewer optimizer steps than this share of the plan."""
_GENERATION_AXES = ("gen_tp", "gen_pp", "gen_replica")
_TRAINING_AXES = (
    "tp",
    "cp",
    "tp_cp",
    "pp",
    "dp",
    "weights",
    "shard",
    "replicate",
    "replica",
    "model",
)
_AXES = (*_TRAINING_AXES, *_GENERATION_AXES, "micro_dp", "gen_parts")
_EXPERT_AXES = ("ep", "expert_dp", "tp_ep", "copy")

Score = Callable[[Any, MicroBatch], dict[str, Tensor]]
Step = Callable[[TensorDict, int], Mapping[str, Metric]]
"""(rows of a mini-batch, number of micro-batches) -> metrics of one optimizer step."""


class EngineWorker(Worker):
    """A worker with one train engine."""

    head: ClassVar[str] = "causal_lm"
    """The head of the model: causal_lm, critic (a trained value head) or scalar."""
    engine_kinds: ClassVar[tuple[str, ...]] = ()
    """Engines that this class may run on, its default first. (): any engine of the settings."""
    generates: ClassVar[bool] = False
    """Whether it generates on its training ranks. rollout.layout is then part of the layout."""
    exports: ClassVar[bool] = False
    """Whether a checkpoint holds the model as a Hugging Face folder too."""

    @classmethod
    def layout_of(cls, cfg: Any, ranks: tuple[int, ...]) -> Layout:
        """Return the layout of the ranks, with the sizes of cfg.engine.layout.

        For a class that generates, the generation sizes are those of cfg.rollout.layout, otherwise
        the training sizes. The dp size is the number of ranks divided by the ranks of one model
        replica.
        """
        sizes = training_sizes(cls.role, cfg.engine)
        generation = generation_sizes(cls.role, cfg) if cls.generates else sizes
        return Layout(
            ranks,
            pp_size=sizes.pp,
            dp_size=len(ranks) // sizes.replica,
            tp_size=sizes.tp,
            cp_size=sizes.cp,
            shard_size=sizes.shard,
            expert_size=sizes.ep,
            virtual_size=sizes.virtual,
            gen_tp_size=generation.tp,
            gen_pp_size=generation.pp,
            gen_expert_size=generation.ep if cls.generates else 1,
        )

    @classmethod
    def needed_groups(cls, cfg: Any, layout: Layout) -> list[tuple[int, ...]]:
        """Return the ranks of each process group that the role needs, without groups of one rank.

        The first is the whole pool. A layout with tensor, context or pipeline parallelism, in
        training or in generation, or with divided experts, adds the groups of all its axes and, for
        a pipeline with tied embeddings, groups of its first and last stage. A purely data-parallel
        layout adds shard and replicate groups only if its engine shards parameters, and over a part
        of the pool.
        """
        is_divided = layout.expert_size > 1
        is_plain = layout.cp_size == 1 and not is_divided
        if layout.dp_size == layout.generation_dp_size == layout.size and is_plain:
            sharding = engine_kind(cls.bind_engine(cfg).engine.kind).sharding
            is_part = sharding.parameters and layout.shard_size < layout.size
            return axis_groups(layout, ("shard", "replicate") if is_part else ())
        tied = False
        if layout.pp_size > 1 and cls.head == "causal_lm":
            tied = Architecture.sizes_from_folder(cfg.model.path).tied
        axes = list(_AXES)
        if tied:
            axes.append("embedding")
        if is_divided:
            axes += _EXPERT_AXES
        return axis_groups(layout, axes)

    @classmethod
    def host_groups(cls, cfg: Any, layout: Layout) -> list[tuple[int, ...]]:
        """The pool, replicas (for metrics), dp (sums of map functions), and generation's groups."""
        return axis_groups(layout, ("replica", "dp", *(_GENERATION_AXES if cls.generates else ())))

    @classmethod
    def bind_engine(cls, cfg: Any) -> Any:
        """Return the role's settings with an engine that this class may run on.

        They are returned unchanged if the class has no `engine_kinds`, or if engine.kind is one of
        them. If engine.kind has its default value, a copy has the first of engine_kinds instead.
        ConfigError if it has another value.
        """
        kind = cfg.engine.kind
        kinds = cls.engine_kinds
        if not kinds or kind in kinds:
            return cfg
        if kind != EngineConfig.kind:
            raise ConfigError(
                f"{cls.role}.engine.kind: got {kind}, but {cls.__name__} is bound to "
                f"{' or '.join(kinds)}; remove it or choose another base class"
            )
        return replace(cfg, engine=replace(cfg.engine, kind=kinds[0]))

    def __init__(self, cfg: Any, context: WorkerContext, *, head: str | None = None) -> None:
        """Builds the engine, or uses the one of the worker that cfg.shares names.

        head: replaces that of the class. ConfigError if a class combines roles with several heads.
        """
        heads = {}
        for role in type(self).__mro__:
            if role is not EngineWorker and "head" in vars(role):
                heads[vars(role)["head"]] = role.__name__
        if len(heads) > 1 and "head" not in vars(type(self)):
            raise ConfigError(
                f"{type(self).__name__}: combines roles with several heads ("
                f"{', '.join(f'{name}: {head}' for head, name in heads.items())}), expected one, "
                f"because a worker has one model; spawn them as two models"
            )
        cfg = self.bind_engine(cfg)
        super().__init__(cfg, context)
        self._lender = _lender_of(cfg, context)
        adopt = self.adopter()
        self.engine: TrainEngine
        if self._lender is None:
            self.engine = engine_of(cfg, context, head=head or self.head, adopt=adopt)
        else:
            self.engine = self._lender.engine
        self._copies = HostCopies()
        stay = () if adopt is None else ("parameters",)
        own = () if self._lender is not None else cfg.engine.offloaded_parts
        self._moved = tuple(part for part in own if part not in stay)
        self._move("host", self._moved)

    def adopter(self) -> Callable[..., None] | None:
        """A function that moves the weights to permanent storage. None: the engine's own
        storage."""
        return None

    def score(self, batch: TensorDict, fn: Score) -> TensorDict | None:
        """Forward without gradient over this call's micro-batches. None before the last stage."""
        with self.resident("parameters"):
            return self.engine.forward(batch, fn, num_micro_batches=self.call.num_micro_batches)

    def train(self, batch: TensorDict, loss: Loss, *, prefix: str) -> dict[str, float]:
        """One optimizer step for each mini-batch of the call. Returns metrics averaged over
        steps."""

        def step(rows: TensorDict, num_micro_batches: int) -> Mapping[str, Metric]:
            return self.engine.train_step(rows, loss, num_micro_batches=num_micro_batches)

        return self.take_steps(batch, step, prefix=prefix)

    def take_steps(self, batch: TensorDict, step: Step, *, prefix: str) -> dict[str, float]:
        """Call `step` for each mini-batch of the running call, and return metrics over the steps.

        Before that it tells the optimizer the position in the run. Parameters, gradients and
        optimizer state are on the device meanwhile. A metric name without "/" gets the prefix.
        Numbers are averaged over the mini-batches that took an optimizer step.
        prefix/optimizer_steps counts these steps. The other mini-batches (`EMPTY`, `NONFINITE`) are
        counted in prefix/empty_steps and prefix/nonfinite_steps, which are omitted if 0.
        """
        self._begin_update()
        before = self._steps_done
        steps = []
        skipped = {EMPTY: 0.0, NONFINITE: 0.0}
        with self.resident("parameters", "gradients", "optimizer"):
            for mini in self.call.mini_batches:
                step_metrics = dict(step(select_rows(batch, mini.index), mini.num_micro_batches))
                for name in skipped:
                    skipped[name] += step_metrics.pop(name, None) is not None
                steps.append(
                    {n if "/" in n else f"{prefix}/{n}": x for n, x in step_metrics.items()}
                )
        self._log_beyond_plan(before)
        metrics = merge(steps)
        metrics[f"{prefix}/optimizer_steps"] = float(self._steps_done - before)
        for name, count in skipped.items():
            if count:
                metrics[f"{prefix}/{name}"] = count
        return metrics

    def close(self) -> None:
        """Log if the run has ended with less than 90 % of its planned optimizer steps.

        Nothing is logged for an engine of another worker or without an optimizer, or if the last
        call was not in the run's last step.
        """
        super().close()
        optimizer = self.engine.optimizer
        if self._lender is not None or optimizer is None:
            return
        num_steps = optimizer.progress.num_steps
        if num_steps == 0 or self.call.step != num_steps:
            return
        planned = self._planned_total
        if optimizer.steps_done < _MUCH_OF_PLAN * planned:
            self._log_plan(f"the run took {optimizer.steps_done} optimizer steps")

    def _begin_update(self) -> None:
        """Tell the optimizer at which step of the run its next steps are.

        It also gets the number of the run's steps and the planned optimizer steps in each. The
        learning rate follows from these. Does nothing without an optimizer.
        """
        optimizer = self.engine.optimizer
        if optimizer is not None:
            optimizer.progress.begin_update(
                step=self.call.step,
                num_steps=self.call.total_steps,
                planned_in_step=planned_steps(getattr(self.cfg, "update", None)),
                steps_done=optimizer.steps_done,
            )

    def _log_beyond_plan(self, before: int) -> None:
        """Logs when an update has taken the first optimizer step beyond the plan."""
        planned = self._planned_total
        if planned and before <= planned < self._steps_done:
            self._log_plan(f"the run has taken optimizer step {planned + 1}")

    def _log_plan(self, fact: str) -> None:
        """Log the fact and the planned number of optimizer steps, on the pool's first rank only.

        With a constant schedule it is logged as information, otherwise as a warning that also says
        what the learning rate does.
        """
        optimizer = self.engine.optimizer
        assert optimizer is not None
        if self.context.rank != self.context.layout.ranks[0]:
            return
        cfg = optimizer.cfg
        per_step = planned_steps(getattr(self.cfg, "update", None))
        plan = f"{self._planned_total} ({optimizer.progress.num_steps} steps x {per_step})"
        if cfg.total_steps:
            plan = f"{self._planned_total} (optimizer.total_steps)"
        if cfg.schedule == "constant":
            logger.info("%s: %s, planned were %s", self.context.name, fact, plan)
            return
        consequence = "the learning rate follows the steps of the run and ends with its last"
        if cfg.total_steps:
            consequence = (
                f"the learning rate is {optimizer.next_lr:g} now; check optimizer.total_steps"
            )
        logger.warning("%s: %s, planned were %s; %s", self.context.name, fact, plan, consequence)

    @property
    def _planned_total(self) -> int:
        """Number of optimizer steps planned for the run.

        It is optimizer.total_steps or, if that is 0, the steps of the run times the planned
        optimizer steps in each. 0 if there is no optimizer or no update of a step has begun.
        """
        optimizer = self.engine.optimizer
        if optimizer is None or optimizer.progress.num_steps == 0:
            return 0
        per_step = planned_steps(getattr(self.cfg, "update", None))
        return optimizer.cfg.total_steps or optimizer.progress.num_steps * per_step

    @contextmanager
    def resident(self, *parts: Part) -> Iterator[None]:
        """Keep these parts of the engine on the device inside the with block.

        Parts that the settings offload move to the device first, and back to the host on exit, also
        after an error. If the engine belongs to another worker (cfg.shares), that worker moves its
        parts, and forward passes inside the block run without its adapters.
        """
        if self._lender is not None:
            with self._lender.resident(*parts), self.engine.without_adapters():
                yield
            return
        self._move("device", parts)
        try:
            yield
        finally:
            self._move("host", parts)

    @property
    def frozen_folder(self) -> Path | None:
        """Folder of the weights that are never trained; None if all weights are trained.

        It is cfg.model.path for a model whose settings have no optimizer, and for a model with
        adapters, whose other weights stay as they are.
        """
        is_whole = self._is_trained and self.engine.model.lora is None
        if is_whole:
            return None
        return Path(self.cfg.model.path)

    def save_state(self, folder: Path) -> Callable[[], None] | None:
        """Copy what this rank saves to host memory, and return a function that writes it.

        The function writes rank-N.safetensors into the folder, N the rank's position in the pool.
        Each element of parameters and moments is written by exactly one rank, bit for bit, together
        with `plain_state`. Returns None for a model whose settings have no optimizer: a class that
        changes such a model must save and load it itself. All ranks of the pool call it together.
        """
        if not self._is_trained:
            return None
        with self.resident("parameters", "optimizer"):
            copies = self._copies.take(self.engine.own_state_blocks())
        return partial(write_state, folder / self._file, copies, self.plain_state())

    def export_state(self, saved: Path, folder: Path, wait: Callable[[list[Path]], None]) -> None:
        """Write this rank's files of a Hugging Face folder to folder/hugging_face.

        They are made from the rank-N.safetensors that all ranks write to `saved`; wait(paths) waits
        for these. Does nothing if the class does not export its model, if the model is not trained,
        or if this rank has no file to write.
        """
        index = self._group_rank
        count = self.context.layout.size
        if not self.exports or not self._is_trained:
            return
        names = [f"rank-{index}.safetensors" for index in range(count)]
        state = StateFiles(saved, index=index, count=count, unsealed=names)
        export = ModelExport(state.plain, index=index, count=count)
        if export.mine:
            wait([saved / name for name in names])
            with disk_errors("write", folder):
                export.write(state, folder / "hugging_face")

    @any_layout
    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, whatever layout it was written on.

        Sets parameters, moments, the number of optimizer steps and the schedule, then calls
        `load_plain`. CheckpointError if a tensor is missing, additional or of another shape than in
        the model. Does nothing for a model whose settings have no optimizer.
        """
        if not self._is_trained:
            return
        files = StateFiles(folder, index=self._group_rank, count=self.context.layout.size)
        saved = files.plain["shapes"]
        mine = self._shapes
        for name in sorted(saved.keys() | mine.keys()):
            if saved.get(name) != mine.get(name):
                raise CheckpointError(
                    f"checkpoint: {folder} has {name} of shape {saved.get(name)}, expected "
                    f"{mine.get(name)}; resume with the model that wrote it"
                )
        if self.engine.optimizer is not None:
            self.engine.optimizer.load_schedule(files.plain.get("schedule", {}))
        with self.resident("parameters", "optimizer"):
            self.engine.load_blocks(files.fill, files.plain["steps_done"])
        self.load_plain(files.plain)

    def plain_state(self) -> dict[str, Any]:
        """State that is saved with the boxes: JSON data, equal on every rank."""
        optimizer = self.engine.optimizer
        return {
            "steps_done": self._steps_done,
            "schedule": {} if optimizer is None else optimizer.schedule_state(),
            "shapes": self._shapes,
            "model": self._model,
        }

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Restores what a role adds to `plain_state`. Called after the boxes are loaded."""

    @cached_property
    def _model(self) -> dict[str, Any]:
        """Return what an export needs besides weights, as JSON data: config, dtype and source.

        source is the absolute path of the model's folder. With adapters there is also lora: their
        settings, in which the target all-linear is replaced by the sorted names of the layers that
        have one.
        """
        model = self.engine.model
        dtype = str(self.engine.dtype).removeprefix("torch.")
        config = json.loads(json.dumps(dict(model.config)))
        source = str(model.source.absolute())
        facts = {"config": config, "dtype": dtype, "source": source}
        buffers = self.engine.trained_shapes.keys() - self.engine.shapes.keys()
        if buffers and model.lora is None:
            facts["float32"] = sorted(buffers)  # a balance bias is too coarse in bfloat16
        if model.lora is not None:
            adapters = filter(is_adapter, self._shapes)
            layers = {name.rsplit(".", 3)[1] for name in adapters}  # x.q_proj.lora_A.weight
            every = ALL_LINEAR in model.lora.targets
            targets = sorted(layers) if every else model.lora.targets
            facts["lora"] = {**asdict(model.lora), "targets": targets}
        return facts

    @property
    def _shapes(self) -> dict[str, list[int]]:
        """Shape of each trained tensor by Hugging Face name, as a list of numbers (JSON data)."""
        shapes = {}
        for name, shape in self.engine.trained_shapes.items():
            shapes[name] = list(shape)
        return shapes

    @property
    def _is_trained(self) -> bool:
        return hasattr(self.cfg, "optimizer")

    @property
    def _steps_done(self) -> int:
        if self.engine.optimizer is None:
            return 0
        return self.engine.optimizer.steps_done

    @property
    def _file(self) -> str:
        return f"rank-{self._group_rank}.safetensors"

    @property
    def _group_rank(self) -> int:
        return self.context.layout.group_rank(self.context.rank)

    def _move(self, where: Place, parts: tuple[Part, ...]) -> None:
        for part in parts:
            if part in self._moved:
                self.engine.residency(where, part)


def _lender_of(cfg: Any, context: WorkerContext) -> EngineWorker | None:
    """Return the worker of this rank that cfg.shares names, whose engine the role uses.

    None if cfg has no such name, and the role builds its own engine. ConfigError if that worker has
    not been spawned on this rank, or has no engine.
    """
    name = getattr(cfg, "shares", None)
    lender = context.workers.get(name) if name is not None else None
    if name is not None and not isinstance(lender, EngineWorker):
        got = f"{name} before there is one on rank {context.rank}"
        expected = "it there"
        do = f"spawn {name} first, on the same pool"
        raise ConfigError.of(f"{context.name}.shares", got, expected, do)
    if isinstance(lender, EngineWorker):
        return lender
    return None


def axis_groups(layout: Layout, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of the pool, followed by the groups of these axes.

    Each group occurs once. Groups of a single rank are dropped, also the pool.
    """
    groups = [layout.ranks]
    for axis in axes:
        groups += layout.axis_groups(axis)
    return [ranks for ranks in dict.fromkeys(groups) if len(ranks) > 1]


class FSDPWorker(EngineWorker):
    """A role on FSDP2: parameters, gradients and moments sharded over the pool."""

    engine_kinds = engines_of("FSDPWorker")


class ZeROWorker(EngineWorker):
    """A role on ZeRO, stage 3 unless engine.kind names another stage."""

    engine_kinds = engines_of("ZeROWorker")


class ThreeDParallelWorker(EngineWorker):
    """A role on Megatron-Core: tensor-, pipeline- and data-parallel, sizes from engine.layout."""

    engine_kinds = engines_of("ThreeDParallelWorker")
