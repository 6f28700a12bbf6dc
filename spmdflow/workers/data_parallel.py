"""`DataParallelEngine`: a Hugging Face model on all ranks of a pool, each with rows of its own.

What `fsdp` and `zero` share: micro-batches, gradients summed over global denominators, clipping,
weights out, state. They differ in what the ranks divide among themselves (`Partition`). Knows no
roles: what an output means is up to `fn` and `loss`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import MODULUS, positional_hash, to_signed
from spmdflow.config.schema import EngineConfig, OptimizerConfig
from spmdflow.errors import ConfigError, ProtocolError, SpmdflowError
from spmdflow.kind.engine import engines_that_cut
from spmdflow.objectives.loss import Loss
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.worker import Metric, WorkerContext
from spmdflow.workers.engine import ForwardFn, Part, Place
from spmdflow.workers.hugging_face import LoadedModel, export_folder
from spmdflow.workers.micro_batch import MicroBatch, join_columns, micro_batches
from spmdflow.workers.optimizer import ShardedAdamW, clip_, copy_block, squared_norm
from spmdflow.workers.sharding import (
    Partition,
    Shard,
    mesh_of,
    set_last_micro_batch,
    shard_model,
    shards,
    units,
)


class DataParallelEngine(ABC):
    """A `TrainEngine` over a loaded model; without an optimizer it only runs forward.

    All ranks of context.layout.ranks build it together. total_optimizer_steps is for schedules
    that end. ConfigError if the layout is not purely data-parallel.
    """

    def __init__(
        self,
        model: LoadedModel,
        cfg: EngineConfig,
        context: WorkerContext,
        *,
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
    ) -> None:
        self.name, self.layout, self.groups = context.name, context.layout, context.groups
        self.device, self.dtype, self.rank = context.device, model.dtype, context.rank
        self.weights_version = 0
        _check_layout(self.name, cfg.kind, self.layout)
        self._cfg, self._model, self._partition = cfg, model, self.partition_of(cfg)
        self._group = self.groups.get(self.layout.ranks)
        if optimizer is None:
            _freeze(model)
        mesh = mesh_of(self._partition, context)
        self._shard_group = mesh.get_group(mesh.ndim - 1)
        shard_model(model, self._partition, mesh, recompute=cfg.recompute)
        assert isinstance(model.module, FSDPModule)
        self._root: FSDPModule = model.module
        self._optimizer = (
            self._optimizer_of(optimizer, total_optimizer_steps) if optimizer is not None else None
        )

    @staticmethod
    @abstractmethod
    def partition_of(cfg: EngineConfig) -> Partition:
        """What the ranks divide among themselves under these settings."""

    # -- running ------------------------------------------------------------------------------

    def forward(self, batch: TensorDict, fn: ForwardFn, *, num_micro_batches: int) -> TensorDict:
        """See `TrainEngine.forward`. Answers leave the device micro-batch by micro-batch."""
        micros = self._micro_batches(batch, num_micro_batches)
        with torch.no_grad():
            answers = [
                {name: column.cpu() for name, column in fn(self._output(micro), micro).items()}
                for micro in micros
            ]
        self._reshard()
        return join_columns(answers, micros)

    def train_step(
        self, batch: TensorDict, loss: Loss, *, num_micro_batches: int
    ) -> dict[str, Metric]:
        """See `TrainEngine.train_step`. Metrics are already global: equal on every rank."""
        optimizer = self._require_optimizer()
        totals = self._global_sums(loss.denominators(batch))
        local = self._accumulate(self._micro_batches(batch, num_micro_batches), loss, totals)
        metrics = loss.finalize(self._global_sums(local))
        gradients = {name: g for name, g in self._gradients() if g is not None}
        norm = self._gradient_norm(gradients)
        self._require_finite(norm, metrics["loss"])
        clip_(gradients.values(), norm, optimizer.cfg.clip_norm)
        lr = optimizer.next_lr
        optimizer.step(gradients)
        self.weights_version += 1
        self._root.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
        return {**metrics, "grad_norm": norm, "lr": lr}

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
        found = self._shards()
        local = [
            to_signed(positional_hash(shard.local.to(dtype), shard.offset))
            for shard in found.values()
        ]
        sums = torch.tensor(local, dtype=torch.int64, device=self.device)
        dist.all_reduce(sums, group=self._shard_group)  # int64 wraps: a sum modulo 2**64
        return {name: value % MODULUS for name, value in zip(found, sums.tolist(), strict=True)}

    def export_hugging_face(self, folder: Path) -> None:
        """See `TrainEngine.export_hugging_face`; every rank gathers, the first writes."""
        tensors = self.full_tensors()
        if self.rank == self.layout.ranks[0]:
            export_folder(folder, self._model, tensors)
        for _ in tensors:  # the other ranks take part in the gathers
            pass

    # -- state --------------------------------------------------------------------------------

    def state_blocks(self) -> dict[str, Tensor]:
        """Rows of parameters and moments under their names, "optimizer.steps"; live tensors."""
        optimizer = {} if self._optimizer is None else self._optimizer.state_blocks()
        return self._owned() | optimizer

    def load_blocks(self, blocks: Mapping[str, Tensor]) -> None:
        """Restore bit for bit; CheckpointError for a missing or misshapen block."""
        self.weights_version += 1
        for name, target in self._owned().items():
            copy_block(target, blocks, name)
        if self._optimizer is not None:
            self._optimizer.load_blocks(blocks)

    def residency(self, where: Place, part: Part) -> None:
        """Move parameters or optimizer moments between device and host memory.

        On a CPU device both are the same memory and nothing moves. Gradients exist only inside
        train_step, so there is nothing of theirs to move either.
        """
        target = self.device if where == "device" else torch.device("cpu")
        if part == "parameters" and self.device.type != "cpu":
            self._model.module.to(target)
            if self._optimizer is not None:
                self._optimizer.rebind(self._local())
        if part == "optimizer" and self._optimizer is not None:
            self._optimizer.move_moments(target)

    # -- helpers, in the order of use ---------------------------------------------------------

    def _optimizer_of(self, cfg: OptimizerConfig, total_steps: int) -> ShardedAdamW:
        return ShardedAdamW(self._local(), cfg, total_steps)

    def _local(self) -> dict[str, Tensor]:
        """Live local rows by name."""
        return {name: shard.local for name, shard in self._shards().items()}

    def _owned(self) -> dict[str, Tensor]:
        """Those of the local rows that this rank saves: over all ranks each row once."""
        return self._local()

    def _micro_batches(self, batch: TensorDict, num_micro_batches: int) -> list[MicroBatch]:
        by_tokens = self._cfg.max_micro_batch_tokens is not None
        return micro_batches(
            batch, num_micro_batches=num_micro_batches, by_tokens=by_tokens, device=self.device
        )

    def _output(self, micro: MicroBatch) -> Tensor:
        return self._model.output(self._model.module, micro.input_ids)

    def _reshard(self) -> None:
        """Free gathered parameters: the next call may follow an update or an offload."""
        for unit in units(self._model.module):
            unit.reshard()

    def _require_optimizer(self) -> ShardedAdamW:
        if self._optimizer is None:
            raise ProtocolError(
                f"{self.name}: train_step on a model without an optimizer; expected one built "
                f"for training; give the engine an OptimizerConfig"
            )
        return self._optimizer

    def _global_sums(self, local: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Sums over the dp group in float64; every rank gives the same names."""
        names = sorted(local)
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for place, name in enumerate(names):
            sums[place] = local[name]
        dist.all_reduce(sums, group=self._group)
        return dict(zip(names, sums.tolist(), strict=True))

    def _accumulate(
        self, micros: list[MicroBatch], loss: Loss, totals: Mapping[str, float]
    ) -> dict[str, float | Tensor]:
        """Forward and backward of every micro-batch; the sums of loss and metrics."""
        sums: dict[str, float | Tensor] = {}
        for number, micro in enumerate(micros):
            set_last_micro_batch(self._root, self._partition, last=number == len(micros) - 1)
            value, metrics = loss(self._output(micro), micro, totals)
            value.backward()
            for name, x in {**metrics, "loss": value}.items():
                sums[name] = sums.get(name, 0.0) + x.detach().double()
        self._reshard()
        return sums

    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        return ((name, shard.gradient) for name, shard in self._shards().items())

    def _gradient_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Norm of the whole gradient: squares of all shards, summed over the ranks that share."""
        square = squared_norm(gradients.values(), self.device)
        dist.all_reduce(square, group=self._shard_group)
        return math.sqrt(float(square))

    def _require_finite(self, norm: float, loss: float) -> None:
        optimizer = self._require_optimizer()
        if not math.isfinite(norm):
            raise SpmdflowError(
                f"{self.name}: optimizer step {optimizer.steps_done} has gradient norm {norm} and "
                f"loss {loss}; expected finite numbers, no weight was changed; lower optimizer.lr "
                f"({optimizer.cfg.lr}) or look for extreme rewards and log-probs in the batch"
            )

    def _shards(self) -> dict[str, Shard]:
        return shards(self._model.module)


def _check_layout(name: str, kind: str, layout: Layout) -> None:
    sizes = {"dp_size": layout.dp_size, "shard_size": layout.shard_size}
    if sizes["dp_size"] != layout.size or sizes["shard_size"] not in (1, layout.size):
        raise ConfigError(
            f"{name}: engine {kind} got {sizes} for {layout.size} ranks; expected dp_size "
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
