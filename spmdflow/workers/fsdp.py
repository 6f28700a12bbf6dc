"""`FSDPEngine`: a Hugging Face model on all ranks of a pool, each with rows of its own.

Every rank holds 1/n of each parameter (float32), gathers one decoder layer at a time in the
compute precision, and steps AdamW on its own shards: PyTorch's FSDP2 (Zhao et al. 2023), which is
ZeRO stage 3 (Rajbhandari et al. 2020). Kinds that keep a unit gathered through a train step, or
reduce gradients once per step instead of once per micro-batch, send less and need more memory:
`Sharding` of their kind says so, and which they are. Knows no roles: what an output means is up to
`fn` and `loss`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import positional_hash
from spmdflow.config.schema import EngineConfig, OptimizerConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind, engines_that_cut
from spmdflow.objectives.loss import Loss
from spmdflow.transfer.worker import WorkerContext
from spmdflow.workers.engine import ForwardFn, Part, Place, TrainEngine, sum_hashes
from spmdflow.workers.micro_batch import MicroBatch, join_columns
from spmdflow.workers.model import LoadedModel
from spmdflow.workers.optimizer import ShardedAdamW, clip_, copy_block, squared_norm
from spmdflow.workers.sharding import (
    Shard,
    mesh_of,
    set_last_micro_batch,
    shard_model,
    shards,
    units,
)


class FSDPEngine(TrainEngine):
    """A `TrainEngine` over a loaded model; without an optimizer it only runs forward.

    All ranks of context.layout.ranks build it together. total_optimizer_steps is for schedules
    that end. ConfigError if the layout is not purely data-parallel.
    """

    model: LoadedModel
    optimizer: ShardedAdamW | None = None

    def __init__(
        self,
        model: LoadedModel,
        cfg: EngineConfig,
        context: WorkerContext,
        *,
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
    ) -> None:
        _check_layout(context, cfg.kind)
        super().__init__(model, cfg, context)
        self.sharding = engine_kind(cfg.kind).sharding_with(cfg.options)
        """What the ranks divide among themselves."""
        self._module = model.module
        if optimizer is None:
            _freeze(model)
        mesh = mesh_of(self.sharding, context)
        self._shard_group = mesh.get_group(mesh.ndim - 1)
        shard_model(model, self.sharding, mesh, recompute=cfg.recompute)
        assert isinstance(model.module, FSDPModule)
        self._root: FSDPModule = model.module
        if optimizer is not None:
            self.optimizer = self._optimizer_of(optimizer, total_optimizer_steps)

    # -- running ------------------------------------------------------------------------------

    def forward(self, batch: TensorDict, fn: ForwardFn, *, num_micro_batches: int) -> TensorDict:
        """See `TrainEngine.forward`."""
        micros = self.micro_batches(batch, num_micro_batches)
        with torch.no_grad():
            answers = [
                {name: column.cpu() for name, column in fn(self._output(micro), micro).items()}
                for micro in micros
            ]
        self._reshard()
        return join_columns(answers, micros)

    def accumulate(
        self, micros: list[MicroBatch], loss: Loss, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """See `TrainEngine.accumulate`."""
        sums: dict[str, float | Tensor] = {}
        for number, micro in enumerate(micros):
            set_last_micro_batch(self._root, self.sharding, last=number == len(micros) - 1)
            value, metrics = loss(self._output(micro), micro, totals)
            value.backward()
            for name, x in {**metrics, "loss": value}.items():
                sums[name] = sums.get(name, 0.0) + x.detach().double()
        self._reshard()
        return self.dp_sums(sums)

    def gradient_norm(self) -> float:
        """Norm of the whole gradient: squares of all shards, summed over the ranks that share."""
        square = squared_norm(self._gradients().values(), self.device)
        dist.all_reduce(square, group=self._shard_group)
        return math.sqrt(float(square))

    def update(self, norm: float) -> None:
        """See `TrainEngine.update`; every rank steps its rows."""
        assert self.optimizer is not None
        gradients = self._gradients()
        clip_(gradients.values(), norm, self.optimizer.cfg.clip_norm)
        self.optimizer.step(gradients)
        self._root.zero_grad(set_to_none=True)  # type: ignore[attr-defined]

    # -- weights ------------------------------------------------------------------------------

    def blocks(self) -> Iterator[tuple[str, Tensor, Box]]:
        """(Hugging Face name, live local rows, their box); tied parameters once."""
        return ((name, shard.local, shard.box) for name, shard in self._shards().items())

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole float32 tensor), gathered one by one, in the same order."""
        return ((name, shard.full()) for name, shard in self._shards().items())

    def shard_hashes(self, dtype: torch.dtype) -> dict[str, int]:
        """Hash of each whole tensor cast to dtype: pieces hashed where they lie, then summed.

        Where every rank holds whole parameters each hashes its own copy.
        """
        local = {
            name: positional_hash(shard.local.to(dtype), shard.offset)
            for name, shard in self._shards().items()
        }
        return sum_hashes(local, self._shard_group, self.device)

    # -- state --------------------------------------------------------------------------------

    def state_blocks(self) -> dict[str, Tensor]:
        """Rows of parameters and moments under their names, "optimizer.steps"; live tensors."""
        optimizer = {} if self.optimizer is None else self.optimizer.state_blocks()
        return self._owned() | optimizer

    def load_blocks(self, blocks: Mapping[str, Tensor]) -> None:
        """Restore bit for bit; CheckpointError for a missing or misshapen block."""
        self.weights_version += 1
        for name, target in self._owned().items():
            copy_block(target, blocks, name)
        if self.optimizer is not None:
            self.optimizer.load_blocks(blocks)

    def residency(self, where: Place, part: Part) -> None:
        """Move parameters or optimizer moments between device and host memory.

        On a CPU device both are the same memory and nothing moves. Gradients exist only inside
        train_step, so there is nothing of theirs to move either.
        """
        target = self.device if where == "device" else torch.device("cpu")
        if part == "parameters" and self.device.type != "cpu":
            self._module.to(target)
            if self.optimizer is not None:
                self.optimizer.rebind(self._local())
        if part == "optimizer" and self.optimizer is not None:
            self.optimizer.move_moments(target)

    # -- helpers, in the order of use ---------------------------------------------------------

    def _optimizer_of(self, cfg: OptimizerConfig, total_steps: int) -> ShardedAdamW:
        return ShardedAdamW(self._local(), cfg, total_steps)

    def _local(self) -> dict[str, Tensor]:
        """Live local rows by name."""
        return {name: shard.local for name, shard in self._shards().items()}

    def _owned(self) -> dict[str, Tensor]:
        """Those of the local rows that this rank saves: over all ranks each row once."""
        return self._local()

    def _output(self, micro: MicroBatch) -> Tensor:
        return self.model.output(self._module, micro.input_ids)

    def _reshard(self) -> None:
        """Free gathered parameters: the next call may follow an update or an offload."""
        for unit in units(self._module):
            unit.reshard()

    def _gradients(self) -> dict[str, Tensor]:
        found = {name: shard.gradient for name, shard in self._shards().items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def _shards(self) -> dict[str, Shard]:
        return shards(self._module)


def _check_layout(context: WorkerContext, kind: str) -> None:
    layout = context.layout
    sizes = {"dp_size": layout.dp_size, "shard_size": layout.shard_size}
    if sizes["dp_size"] != layout.size or sizes["shard_size"] not in (1, layout.size):
        raise ConfigError(
            f"{context.name}: engine {kind} got {sizes} for {layout.size} ranks; expected dp_size "
            f"{layout.size}, as every rank has rows of its own; leave out tp, pp and shard_size "
            f"or choose engine.kind={' or '.join(engines_that_cut())}"
        )


def _freeze(model: LoadedModel) -> None:
    """No gradients, and storage in the compute precision: nothing accumulates small updates."""
    exact = {id(p) for part in model.float32_modules for p in part.parameters()}
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)
        if id(parameter) not in exact:
            parameter.data = parameter.data.to(model.dtype)
