"""`ZeROEngine`: stage 1 of ZeRO from torch's own parts (Rajbhandari et al. 2020).

Stages 2 and 3 are `FSDPEngine` with another `Sharding`:

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

from spmdflow.config.schema import OptimizerConfig
from spmdflow.workers.fsdp import FSDPEngine
from spmdflow.workers.optimizer import ShardedAdamW


class ZeROEngine(FSDPEngine):
    """Whole weights on every rank, moments divided. State and outputs as `FSDPEngine`'s.

    A rank saves the tensors that it steps, so that every tensor is saved once; loading sends them
    to the other ranks.
    """

    def load_blocks(self, blocks: Mapping[str, Tensor]) -> None:
        """See `TrainEngine.load_blocks`; whole parameters go from their owner to every rank."""
        super().load_blocks(blocks)
        for name, tensor in self._local().items():
            dist.broadcast(tensor, self.layout.ranks[self._owner(name)], group=self.dp_group)

    def _optimizer_of(self, cfg: OptimizerConfig, total_steps: int) -> ShardedAdamW:
        return PartitionedAdamW(self._local(), cfg, total_steps, self.dp_group)

    def _owned(self) -> dict[str, Tensor]:
        place = self.layout.group_rank(self.rank)
        return {name: x for name, x in self._local().items() if self._owner(name) == place}

    def _owner(self, name: str) -> int:
        """Position in the pool of the rank that saves a replicated tensor."""
        if isinstance(self.optimizer, PartitionedAdamW):
            return self.optimizer.owners[name]
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
