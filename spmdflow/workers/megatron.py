"""`MegatronEngine`: tensor, pipeline and data parallelism by Megatron-Core (paper section 2.1).

Every rank holds a stage's share of each tensor; micro-batches flow through the stages in 1F1B
order (Narayanan et al. 2021). Works on any subset of ranks and beside other models in the process.
There is no context parallelism: Megatron's attention without TransformerEngine refuses it, and
layouts have no such axis. The embedding of a padding token learns like any other (Hugging Face
stops its gradient). Knows no roles: what an output means is up to `fn` and `loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.config.schema import EngineConfig, OptimizerConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind
from spmdflow.objectives.loss import Loss
from spmdflow.transfer.worker import WorkerContext
from spmdflow.weights.ranks import megatron_tables
from spmdflow.weights.storage import Storages
from spmdflow.weights.table import stage_layers
from spmdflow.workers.engine import ForwardFn, Part, Place, TrainEngine
from spmdflow.workers.megatron_model import build_model, transformer_config
from spmdflow.workers.megatron_optimizer import Adopt, Owned, StageOptimizer
from spmdflow.workers.megatron_runtime import megatron_runtime, process_groups
from spmdflow.workers.megatron_schedule import StageSchedule
from spmdflow.workers.megatron_weights import (
    StageWeights,
    block_name,
    flat_blocks,
)
from spmdflow.workers.micro_batch import MicroBatch, join_columns
from spmdflow.workers.model import ModelSource
from spmdflow.workers.optimizer import STEPS, copy_block


class MegatronEngine(TrainEngine):
    """A `TrainEngine` over a model folder; without an optimizer it only runs forward.

    All ranks of context.layout.ranks build it together. ConfigError if the model cannot be cut
    as the layout asks. adopt: see `megatron_optimizer.Adopt`.
    """

    model: ModelSource
    optimizer: StageOptimizer | None = None

    def __init__(
        self,
        model: ModelSource,
        cfg: EngineConfig,
        context: WorkerContext,
        *,
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
        adopt: Adopt | None = None,
    ) -> None:
        super().__init__(model, cfg, context)
        _check_options(self.name, cfg)
        self._stage = self.layout.coordinate(self.rank).pp
        replica = self.layout.axis_group(self.rank, "replica")
        self._replica = self.groups.get(replica)
        every = megatron_tables(model.architecture, self.layout)  # refuses what cannot be cut
        tables = [every[rank] for rank in replica]
        with megatron_runtime():
            self._megatron_groups = process_groups(self.layout, self.rank, self.groups)
            self._module = self._build()
            if optimizer is None:
                self._module.requires_grad_(False)
            self.weights = StageWeights(self._module, model.architecture, tables, self._replica)
            self.weights.load(model.read)
            self._schedule = StageSchedule(self._module, model.architecture, self._megatron_groups)
            if optimizer is not None:
                self.optimizer = StageOptimizer(
                    self._module,
                    optimizer,
                    self._megatron_groups,
                    total_steps=total_optimizer_steps,
                    distributed=engine_kind(cfg.kind).sharding_with(cfg.options).optimizer,
                    adopt=adopt,
                )
        if self.optimizer is not None and self.dtype != torch.float32:
            self._load_masters()
        self._storages: dict[Part, Storages] = {}

    # -- running ------------------------------------------------------------------------------

    def forward(
        self, batch: TensorDict, fn: ForwardFn, *, num_micro_batches: int
    ) -> TensorDict | None:
        """See `TrainEngine.forward`; None but on the last stage."""
        micros = self.micro_batches(batch, num_micro_batches)

        def answer(output: Any, micro: MicroBatch) -> dict[str, Tensor]:
            return {name: column.cpu() for name, column in fn(output, micro).items()}

        with megatron_runtime(), torch.no_grad():
            answers = self._schedule.forward(micros, answer)
        return join_columns(answers, micros) if self._is_last else None

    def accumulate(
        self, micros: list[MicroBatch], loss: Loss, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """See `TrainEngine.accumulate`. Sums are those of the last stage, on every rank."""
        assert self.optimizer is not None

        def terms(output: Any, micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            value, metrics = loss(output, micro, totals)
            found = {name: x.detach().double() for name, x in {**metrics, "loss": value}.items()}
            return value, torch.zeros((), dtype=torch.int), found

        with megatron_runtime():
            self.optimizer.zero_gradients()
            found = self._schedule.forward_backward(self.optimizer.ddp, micros, terms)
            return self._everywhere(found)

    def gradient_norm(self) -> float:
        """See `TrainEngine.gradient_norm`."""
        assert self.optimizer is not None
        with megatron_runtime():
            return self.optimizer.gradient_norm()

    def update(self, norm: float) -> None:
        """See `TrainEngine.update`."""
        assert self.optimizer is not None
        with megatron_runtime():
            self.optimizer.step(norm)

    # -- weights ------------------------------------------------------------------------------

    def blocks(self) -> Iterator[tuple[str, Tensor, Box]]:
        """(Hugging Face name, live view, its box of the whole) of all that this rank holds."""
        return self.weights.blocks()

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole float32 tensor) on every rank; collective over a replica.

        Of bfloat16 weights these are the rounded values, as the forward pass uses them.
        """
        return self.weights.full_tensors()

    def shard_hashes(self, dtype: torch.dtype) -> dict[str, int]:
        """Hash of each whole tensor cast to dtype; each replica hashes its own copy."""
        return self.weights.hashes(dtype)

    # -- state --------------------------------------------------------------------------------

    def state_blocks(self) -> dict[str, Tensor]:
        """Float32 weights and moments that this rank steps, by name and box; live tensors.

        With the distributed optimizer each element is in the blocks of one dp rank. Without an
        optimizer: the weights held here.
        """
        if self.optimizer is None:
            return {block_name(name, box): view for name, view, box in self.blocks()}
        return self._optimizer_blocks() | {STEPS: torch.tensor(self.optimizer.steps_done)}

    def load_blocks(self, blocks: Mapping[str, Tensor]) -> None:
        """Restore bit for bit on the same layout; collective over dp."""
        self.weights_version += 1
        with torch.no_grad():
            for name, target in self.state_blocks().items():
                copy_block(target, blocks, name)
            if self.optimizer is not None:
                with megatron_runtime():
                    self.optimizer.restored(int(blocks[STEPS]))

    def residency(self, where: Place, part: Part) -> None:
        """Move a part to the host or back. Gradients are not kept: they live within a step.

        On a CPU device only gradients matter: their buffer is freed.
        """
        if part == "optimizer" and self.optimizer is not None:
            self.optimizer.move(self.device if where == "device" else torch.device("cpu"))
        elif part == "parameters" and self.device.type != "cpu":
            storages = self._storages_of(part, list(self._module.parameters()))
            storages.to_host() if where == "host" else storages.restore()
        elif part == "gradients" and self.optimizer is not None:
            buffers = [buffer.grad_data for buffer in self.optimizer.ddp.buffers]
            storages = self._storages_of(part, buffers)
            storages.free() if where == "host" else storages.restore()

    # -- helpers, in the order of use ---------------------------------------------------------

    def _build(self) -> Any:
        layout, options = self.layout, self.cfg.options
        layers = stage_layers(
            self.model.architecture.num_layers, pp_size=layout.pp_size, pp_rank=self._stage
        )
        config = transformer_config(
            self.model.architecture,
            tp_size=layout.tp_size,
            pp_size=layout.pp_size,
            num_layers=len(layers),
            dtype=self.dtype,
            recompute="recompute" in options,
            sequence_parallel="sequence_parallel" in options,
        )
        return build_model(
            self.model.architecture, config, self._megatron_groups, num_layers=len(layers)
        )

    @property
    def _is_last(self) -> bool:
        return self._stage == self.layout.pp_size - 1

    def _everywhere(self, found: list[dict[str, Tensor]]) -> dict[str, float]:
        """Metrics summed over micro-batches and dp, from each replica's first rank of the last
        stage to all its ranks: the same bits everywhere."""
        source = self.layout.axis_group(self.rank, "replica")[-self.layout.tp_size]
        shared: list[Any] = [None]
        if self.rank == source:
            local = {name: sum(metrics[name] for metrics in found) for name in found[0]}
            shared = [self.dp_sums(local)]
        dist.broadcast_object_list(shared, source, group=self._replica, device=self.device)
        metrics: dict[str, float] = shared[0]
        return metrics

    def _owned(self) -> Iterator[Owned]:
        assert self.optimizer is not None
        return self.optimizer.owned()

    def _optimizer_blocks(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self._owned():
            local = self.weights.table[part.name]
            for kind, flat in {"": part.main, **part.moments}.items():
                for name, view, box in flat_blocks(local, flat, part.start):
                    found[block_name(name, box) + (f".{kind}" if kind else "")] = view
        return found

    def _load_masters(self) -> None:
        """Read the float32 masters from the folder, whose values bfloat16 weights have lost."""
        for part in self._owned():
            for name, view, box in flat_blocks(
                self.weights.table[part.name], part.main, part.start
            ):
                view.copy_(self.model.read(name, box))

    def _storages_of(self, part: Part, tensors: list[Tensor]) -> Storages:
        if part not in self._storages:
            self._storages[part] = Storages(tensors)
        return self._storages[part]


def _check_options(name: str, cfg: EngineConfig) -> None:
    known = engine_kind(cfg.kind).options
    unknown = sorted(set(cfg.options) - set(known))
    if unknown:
        raise ConfigError(
            f"{name}.engine.options: got {unknown} for engine {cfg.kind}, expected some of "
            f"{list(known)}; leave them out or choose another engine.kind"
        )
