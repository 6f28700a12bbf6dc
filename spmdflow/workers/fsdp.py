"""`FSDPEngine`, `ZeROEngine`: a Hugging Face model on all ranks of a pool, each with its own rows.

Every rank holds 1/n of each parameter (float32), gathers one decoder layer at a time in the
compute precision, and steps AdamW on its own shards: PyTorch's FSDP2 (Zhao et al. 2023), which is
ZeRO stage 3 (Rajbhandari et al. 2020). With a layout's shard_size s < n, groups of s neighbours
have a copy each (HSDP): gathers and reduce-scatters stay in the group, and an all-reduce over the
groups sums the shards' gradients once a step. Kinds that keep a unit gathered through a train step, or
reduce gradients once per step instead of once per micro-batch, send less and need more memory:
the `Sharding` of their kind states this. The ZeRO stages use torch's own parts:

| kind | divided over the n ranks | parts | sent by a rank in a step of m micro-batches, P bytes float32 |
|---|---|---|---|
| zero1 | moments | FSDP2 on a mesh (replicate n, shard 1); `ZeroRedundancyOptimizer` | 3 P |
| zero2 | moments, gradients, parameters between steps | FSDP2, gathered until the step ends | (1 + m) P |
| zero3 | moments, gradients, parameters | FSDP2, resharded after each layer | 3 m P |

Stage 1 gives each rank whole tensors to step, largest first, each to the rank with the fewest
elements so far, and broadcasts them afterwards; its FSDP2 mesh of one shard casts to the compute
precision and all-reduces float32 gradients once per step, after the last micro-batch. Bytes: for
large n, parameters sent in float32. Where weights are neither gathered nor cast, FSDP2 does not
wrap the module: on one rank in float32, and under stage 1 in float32, where this file sums the
gradients in place. Knows no roles: what an output means is up to `fn` and `loss`.
"""  # noqa: E501 a table row is one line

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from spmdflow.blocks.box import Box
from spmdflow.config.schema import EngineConfig, OptimizerConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind, engines_that_cut
from spmdflow.objectives.balance import BalancedLoss
from spmdflow.objectives.loss import Loss
from spmdflow.weights.adapter import is_adapter
from spmdflow.weights.move import Block
from spmdflow.worker_api.metric import Metric
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.divided_experts import ExpertTraffic, divide_experts
from spmdflow.workers.engine import ForwardFn, Part, Place, TrainEngine
from spmdflow.workers.lora import without_adapters
from spmdflow.workers.micro_batch import MicroBatch
from spmdflow.workers.model import LoadedModel
from spmdflow.workers.optimizer import ShardedOptimizer, clip_, squared_norm, undecayed_of
from spmdflow.workers.sharding import (
    DividedExperts,
    Shard,
    expert_mesh_of,
    merged_adapter_blocks,
    mesh_of,
    read_weights,
    recompute_in_backward,
    saved_buffers,
    separate_adapter_blocks,
    set_last_micro_batch,
    shard_model,
    shards,
    units,
)


class FSDPEngine(TrainEngine):
    """A `TrainEngine` over a loaded model. Without an optimizer it only runs forward.

    All ranks of context.layout.ranks build it together. total_optimizer_steps is for schedules that
    end. ConfigError if the layout is not purely data-parallel.
    """

    model: LoadedModel
    optimizer: ShardedOptimizer | None = None

    def __init__(
        self,
        model: LoadedModel,
        cfg: EngineConfig,
        context: WorkerContext,
        *,
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
    ) -> None:
        """Shards the module, reads this rank's weights and builds the optimizer. See the class."""
        _check_layout(context, cfg.kind)
        super().__init__(model, cfg, context)
        kind = engine_kind(cfg.kind)
        self.sharding = kind.sharding_with(cfg.options)
        """What is divided over the ranks."""
        self._module = model.module
        self._traffic = ExpertTraffic()
        self._all_ranks = self.groups.get(self.layout.ranks)
        if optimizer is None or model.lora is not None:
            _freeze(model, is_trained=optimizer is not None)
        if cfg.recompute:
            recompute_in_backward(model)
        if not kind.is_plain(self.layout.size, str(self.dtype).removeprefix("torch.")):
            mesh = mesh_of(self.sharding, context)
            self.weight_group = mesh.get_group(mesh.ndim - 1)
            self.replica_group = mesh.get_group(0) if mesh.ndim == 2 else None
            shard_model(model, self.sharding, mesh, self._divide_experts(context))
        elif self.layout.size > 1:
            self.replica_group = self._all_ranks
        read_weights(model, self.device)
        if optimizer is not None:
            self.optimizer = self._optimizer_of(optimizer, total_optimizer_steps)

    # -- running ------------------------------------------------------------------------------

    def without_adapters(self) -> AbstractContextManager[None]:
        """See `TrainEngine.without_adapters`."""
        return without_adapters(self._module)

    def outputs(self, micros: list[MicroBatch], fn: ForwardFn) -> list[Mapping[str, Tensor]]:
        """Run the module on each micro-batch and return the results of fn.

        Frees gathered parameters afterwards.
        """
        answers = [self._module(micro, fn) for micro in micros]
        self._reshard()
        return answers

    def accumulate(
        self, micros: list[MicroBatch], loss: Loss, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """Run forward and backward of each micro-batch, with gradients summed over all ranks' rows.

        Returns the loss and its metrics, each summed over micro-batches and the rows of all ranks.
        All ranks call it together. Frees gathered parameters. Reductions that can be deferred run
        in the last micro-batch.
        """
        sums: dict[str, float | Tensor] = {}
        self._traffic.num_bytes = 0
        if self.context_group is not None:
            self.context_group.num_bytes = 0
        routed = self._balanced_loss(loss, micros)
        counted_loss = routed or loss
        for number, micro in enumerate(micros):
            set_last_micro_batch(self._module, self.sharding, last=number == len(micros) - 1)
            self.start_dropout(micro)
            value, metrics = self._module(
                micro, lambda output, rows: counted_loss(output, rows, totals)
            )
            value.backward()
            self.stop_dropout()
            for name, x in {**metrics, "loss": value}.items():
                sums[name] = sums.get(name, 0.0) + x.detach().double()
        if routed is not None:
            routed.statistics.sum_over_ranks(self._sum_in_place)
            self.router_metrics = routed.statistics.metrics() | self._traffic_metrics()
            routed.close()
        if self.context_group is not None:
            self.context_metrics = {
                "context_bytes": self._sum_of_ranks(self.context_group.num_bytes)
            }
        self._reshard()
        if not isinstance(self._module, FSDPModule):
            self._sum_gradients()
        return self.dp_sums(sums)

    def _balanced_loss(self, loss: Loss, micros: list[MicroBatch]) -> BalancedLoss | None:
        """Return the loss with the auxiliary loss of a mixture of experts; None for other models.

        With a weight above 0, a forward without gradient counts the tokens of each expert first.
        """
        routers = self.model.routers
        if routers is None:
            if self.router_balance_coef > 0:
                raise ConfigError.of(
                    "update.router_balance_coef",
                    f"{self.router_balance_coef:g} for a model in which the installed transformers "
                    "does not say which modules are its routers",
                    "a family whose routers are known (_can_record_outputs)",
                    "set it to 0, or install a newer transformers",
                )
            return None
        balanced = BalancedLoss(loss, routers, self.router_balance_coef, self.device)
        if self.router_balance_coef:
            with torch.no_grad():
                self.outputs(micros, balanced.count)
            balanced.sum_counts(self._sum_in_place)
        return balanced

    def _traffic_metrics(self) -> dict[str, Metric]:
        """Return the bytes that all ranks have sent to experts in this step; {} without e."""
        if self.layout.expert_size == 1:
            return {}
        return {"expert_bytes": self._sum_of_ranks(self._traffic.num_bytes)}

    def _sum_of_ranks(self, number: int) -> float:
        """Return the sum of a number over all ranks. They call it together."""
        total = torch.tensor(float(number), dtype=torch.float64, device=self.device)
        self._sum_in_place(total)
        return float(total)

    def _sum_in_place(self, values: Tensor) -> None:
        """Sum a tensor over all ranks. They call it together."""
        if self.layout.size > 1:
            dist.all_reduce(values, group=self._all_ranks)

    def _sum_gradients(self) -> None:
        """Sum the gradients of a module that is not sharded over the ranks, in place.

        All ranks call it together; each has gradients of the same tensors.
        """
        if self.layout.size == 1:
            return
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._all_ranks)

    def gradient_norm(self) -> float:
        """Return the L2 norm of the complete gradient, the same on every rank.

        Squares of this rank's shards are summed over the weight group, the ranks that together hold
        one copy. All ranks of the group call it together.
        """
        square = squared_norm(self._gradients().values(), self.device)
        if self.weight_group is not None:
            dist.all_reduce(square, group=self.weight_group)
        return math.sqrt(float(square))

    def update(self, norm: float) -> None:
        """Clip the gradients by the global norm, step this rank's shards, discard the gradients.

        norm: as `gradient_norm` returned it.
        """
        assert self.optimizer is not None
        gradients = self._gradients()
        clip_(gradients.values(), norm, self.optimizer.cfg.clip_norm)
        self.optimizer.step(gradients)
        self.forget_gradient()

    def forget_gradient(self) -> None:
        """See `TrainEngine.forget_gradient`."""
        self._module.zero_grad()

    # -- weights ------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Block]:
        """(Hugging Face name, live local rows, their box); tied parameters once."""
        return self.own_blocks()

    def own_blocks(self) -> Iterator[Block]:
        """Yield (Hugging Face name, this rank's rows, their box in the complete tensor).

        A tied tensor occurs once. If adapters are merged, the rows of their layers are new tensors
        W + scale B A in the compute precision, whose building is collective, and all others are
        live. Otherwise A and scale B are separate. Reads the rows anew, so that hashes cannot
        repeat an error of a transfer.
        """
        scale = 0.0 if self.model.lora is None else self.model.lora.scale
        if self.merges_adapters:
            return merged_adapter_blocks(
                self._shards(), scale=scale, dtype=self.dtype, count=self._count
            )
        return separate_adapter_blocks(self._shards(), scale=scale)

    def _count(self, num_bytes: int) -> None:
        self.gathered_bytes += num_bytes

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of each complete tensor by Hugging Face name.

        Adapters are included only if they are not merged into their weights.
        """
        shards_by_name = self._shards().items()
        keeps_adapters = not self.merges_adapters
        result = {}
        for name, x in shards_by_name:
            if keeps_adapters or not is_adapter(name):
                result[name] = x.shape
        return result

    @property
    def trained_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the tensors that are saved: all of them, or those that are trained.

        With all of them, also the buffers of the model's files.
        """
        result = {}
        for name, shard in self._trained_shards().items():
            result[name] = shard.shape
        for name, buffer in self._saved_buffers().items():
            result[name] = buffer.shape
        return result

    # -- state --------------------------------------------------------------------------------

    def state_blocks(self) -> Iterator[Block]:
        """Yield (name, live values, box) of this rank's trained tensors and their moments.

        Each tensor is followed by its moments, named "<name>.<moment>", such as <name>.exp_avg.
        Values are this rank's rows, or complete tensors in ZeRO stage 1, where only the rank that
        steps a tensor has its moments.
        """
        for name, shard in self._trained_shards().items():
            yield name, shard.local, shard.box
            if self.optimizer is None:
                moments = {}
            else:
                moments = self.optimizer.moments_of(name)
            for moment, values in moments.items():
                yield f"{name}.{moment}", values, shard.box
        for name, buffer in self._saved_buffers().items():
            yield name, buffer, Box.of_shape(buffer.shape)

    def residency(self, where: Place, part: Part) -> None:
        """Move parameters or optimizer moments between device and host memory.

        On a CPU device nothing moves. Gradients are not moved either, because they exist only
        inside train_step.
        """
        if self.device.type == "cpu" or part == "gradients":
            return
        if part == "parameters":
            self.move(where, part, lambda: [shard.local for shard in self._shards().values()])
        elif self.optimizer is not None:
            self.move(where, part, self.optimizer.moments)

    # -- helpers, in the order of use ---------------------------------------------------------

    def _divide_experts(self, context: WorkerContext) -> DividedExperts | None:
        """Leave this rank its experts if the layout divides them, before anything is sharded."""
        if self.layout.expert_size == 1 or isinstance(self._module, FSDPModule):
            return None
        ranks = self.layout.axis_group(context.rank, "ep")
        group = context.groups.get(ranks)
        ep_rank = ranks.index(context.rank)
        modules = divide_experts(self.model, rank=ep_rank, group=group, traffic=self._traffic)
        return DividedExperts(modules, expert_mesh_of(context))

    def _optimizer_of(self, cfg: OptimizerConfig, total_steps: int) -> ShardedOptimizer:
        return ShardedOptimizer(self._local(), cfg, total_steps, undecayed=self._undecayed_by(cfg))

    def _undecayed_by(self, cfg: OptimizerConfig) -> frozenset[str]:
        """Return the names of the trained tensors without weight decay, by `undecayed_of`."""
        num_dims = {}
        for name, shard in self._trained_shards().items():
            num_dims[name] = shard.parameter.ndim
        modules = self._module.named_modules()
        tables = []
        for name, part in modules:
            if isinstance(part, nn.Embedding):
                tables.append(name)
        return undecayed_of(cfg, num_dims, [f"{name}.weight" for name in tables])

    def _local(self) -> dict[str, Tensor]:
        """Return this rank's rows of the trained tensors by name, sharing storage with them."""
        result = {}
        for name, shard in self._trained_shards().items():
            result[name] = shard.local
        return result

    def _trained_shards(self) -> dict[str, Shard]:
        """Return the shards of all tensors that are trained, by name."""
        lora = self.model.lora
        shards_by_name = self._shards()
        result = {}
        for name, shard in shards_by_name.items():
            if lora is None or lora.adapters.is_trained(name):
                result[name] = shard
        return result

    def _saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the model's files; none if only adapters are trained."""
        return {} if self.model.lora is not None else saved_buffers(self._module)

    def _reshard(self) -> None:
        """Frees gathered parameters, because an update or offload may follow."""
        for unit in units(self._module):
            unit.reshard()

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's shards by name, without tensors that have none."""
        gradients = {}
        for name, shard in self._shards().items():
            gradient = shard.gradient
            if gradient is not None:
                gradients[name] = gradient
        return gradients

    def _shards(self) -> dict[str, Shard]:
        return shards(self._module)


class ZeROEngine(FSDPEngine):
    """ZeRO stage 1: every rank holds all weights, but only the moments of the tensors it steps."""

    def _optimizer_of(self, cfg: OptimizerConfig, total_steps: int) -> ShardedOptimizer:
        """Return an optimizer that divides the tensors over the ranks of the dp group.

        With a single rank it is the same as FSDP's.
        """
        if self.layout.size == 1:
            return super()._optimizer_of(cfg, total_steps)
        undecayed = self._undecayed_by(cfg)
        return PartitionedOptimizer(
            self._local(), cfg, total_steps, self._all_ranks, undecayed=undecayed
        )


class PartitionedOptimizer(ShardedOptimizer):
    """Steps complete tensors that every rank holds: one rank steps each, then broadcasts it."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        cfg: OptimizerConfig,
        total_steps: int,
        group: dist.ProcessGroup,
        *,
        undecayed: Collection[str] = (),
    ) -> None:
        self._group = group
        super().__init__(tensors, cfg, total_steps, undecayed=undecayed)

    def _stepper_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        return ZeroRedundancyOptimizer(
            groups, self.torch_class, process_group=self._group, **self.arguments
        )


def _check_layout(context: WorkerContext, kind: str) -> None:
    layout = context.layout
    if layout.weight_size != layout.size:
        raise ConfigError(
            f"{context.name}: engine {kind} got layout {layout} for {layout.size} ranks; expected "
            f"dp and cp alone, because every rank runs whole layers; remove tp and pp or choose "
            f"engine.kind={' or '.join(engines_that_cut())}"
        )


def _freeze(model: LoadedModel, *, is_trained: bool) -> None:
    """Disable gradients and store the weights in the compute precision, in place.

    float32_modules stay in float32. is_trained: the adapters and the modules to save are trained,
    so they are left as they are.
    """
    exact = set()
    for part in model.float32_modules:
        for p in part.parameters():
            exact.add(id(p))
    for name, parameter in model.module.named_parameters():
        if is_trained and model.lora is not None and model.lora.adapters.is_trained(name):
            continue
        parameter.requires_grad_(False)
        if id(parameter) not in exact:
            parameter.data = parameter.data.to(model.dtype)
