"""`ZeROEngine`: the stages of ZeRO from torch's own parts (Rajbhandari et al. 2020).

| kind | divided over the n ranks | parts | sent by a rank in a step of m micro-batches, P bytes float32 |
|---|---|---|---|
| zero1 | moments | FSDP2 on a mesh (replicate n, shard 1); `ZeroRedundancyOptimizer` | 3 P |
| zero2 | moments, gradients, parameters between steps | FSDP2, gathered until the step ends | (1 + m) P |
| zero3 | moments, gradients, parameters | FSDP2, resharded after each layer | 3 m P |

Stage 1 gives each rank whole tensors to step, largest first to the lightest rank, and broadcasts
them afterwards; its FSDP2 mesh of one shard casts to the compute precision and all-reduces float32
gradients once per step, after the last micro-batch. Bytes: large n, parameters sent in float32.
"""  # noqa: E501 a table row is one line

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from spmdflow.config.schema import EngineConfig, OptimizerConfig
from spmdflow.kind.engine import engine_kind
from spmdflow.workers.data_parallel import DataParallelEngine
from spmdflow.workers.optimizer import ShardedAdamW
from spmdflow.workers.sharding import Partition


class ZeROEngine(DataParallelEngine):
    """Stage 1, 2 or 3, as cfg.kind says. State and outputs as `FSDPEngine`'s.

    In stage 1 a rank saves the tensors that it steps, so that every tensor is saved once; loading
    sends them to the other ranks.
    """

    @staticmethod
    def partition_of(cfg: EngineConfig) -> Partition:
        """What the stage divides, and when it gathers, as its kind states."""
        sharding = engine_kind(cfg.kind).sharding
        return Partition(
            parameters=sharding.parameters,
            reshard_after_forward=sharding.frees_gathered or not sharding.parameters,
            reduce_each_micro_batch=sharding.micro_batch_reductions > 0,
        )

    def load_blocks(self, blocks: Mapping[str, Tensor]) -> None:
        """See `TrainEngine.load_blocks`; whole parameters go from their owner to every rank."""
        super().load_blocks(blocks)
        if self._partition.parameters:
            return
        for name, tensor in self._local().items():
            dist.broadcast(tensor, self.layout.ranks[self._owner(name)], group=self._group)

    def _optimizer_of(self, cfg: OptimizerConfig, total_steps: int) -> ShardedAdamW:
        if self._partition.parameters:
            return super()._optimizer_of(cfg, total_steps)
        return PartitionedAdamW(self._local(), cfg, total_steps, self._group)

    def _owned(self) -> dict[str, Tensor]:
        if self._partition.parameters:
            return super()._owned()
        place = self.layout.group_rank(self.rank)
        return {name: x for name, x in self._local().items() if self._owner(name) == place}

    def _owner(self, name: str) -> int:
        """Position in the pool of the rank that saves a replicated tensor."""
        if isinstance(self._optimizer, PartitionedAdamW):
            return self._optimizer.owners[name]
        return 0


class PartitionedAdamW(ShardedAdamW):
    """AdamW over whole tensors that every rank has: each is stepped by one rank, then broadcast."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        cfg: OptimizerConfig,
        total_steps: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        super().__init__(tensors, cfg, total_steps)
        place = dist.get_rank(group)
        device = next(iter(self._parameters.values())).device
        mine = [place if self.owns(name) else 0 for name in self._parameters]
        places = torch.tensor(mine, device=device)
        dist.all_reduce(places, group=group)  # one owner each: the sum is its place
        self.owners = dict(zip(self._parameters, places.tolist(), strict=True))
        """Position in the pool of the rank that steps each tensor."""

    def owns(self, name: str) -> bool:
        """Whether this rank steps the tensor."""
        parameter = self._parameters[name]
        return any(parameter is p for g in self._adamw.param_groups for p in g["params"])

    def _stepper_of(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, process_group=self._group, **self._settings
        )

    @property
    def _adamw(self) -> torch.optim.Optimizer:
        assert isinstance(self._stepper, ZeroRedundancyOptimizer)
        return self._stepper.optim
