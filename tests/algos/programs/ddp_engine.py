# ddp_engine.py
"""An engine of a user: DistributedDataParallel and AdamW, every rank with the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from spmdflow import EngineKind, OptimizerConfig, Sharding, WorkerContext, register_engine
from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import positional_hash
from spmdflow.config.schema import EngineConfig
from spmdflow.objectives.loss import Loss
from spmdflow.workers.engine import ForwardFn, Part, Place, TrainEngine
from spmdflow.workers.micro_batch import MicroBatch, join_columns
from spmdflow.workers.model import LoadedModel
from spmdflow.workers.optimizer import Scheduled

MOMENTS = ("exp_avg", "exp_avg_sq")


@register_engine(
    EngineKind(
        "ddp",
        "DistributedDataParallel: everything whole on every rank",
        # no rank divides anything; each step all-reduces the gradients, which is two reductions
        Sharding(optimizer=False, reductions=2),
    )
)
class DDPEngine(TrainEngine):
    """Gradients are summed by DDP's buckets, in the last backward of a step."""

    model: LoadedModel

    def __init__(
        self,
        model: LoadedModel,
        cfg: EngineConfig,
        context: WorkerContext,
        *,
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
    ) -> None:
        super().__init__(model, cfg, context)
        self.module = model.module.to(self.device)
        if optimizer is None:
            self.module.requires_grad_(False)
            return
        self.optimizer = Scheduled(optimizer, total_optimizer_steps)
        self.ddp = DistributedDataParallel(self.module, process_group=self.dp_group)
        self.adamw = torch.optim.AdamW(
            self.module.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            weight_decay=optimizer.weight_decay,
        )
        for weight in self.module.parameters():  # made now: checkpoints look alike from the start
            moments = {name: torch.zeros_like(weight) for name in MOMENTS}
            self.adamw.state[weight] = {"step": torch.zeros(()), **moments}

    def forward(self, batch: TensorDict, fn: ForwardFn, *, num_micro_batches: int) -> TensorDict:
        """Columns of fn for every row."""
        micros = self.micro_batches(batch, num_micro_batches)
        with torch.no_grad(), self.precision():
            answers = [
                {name: column.cpu() for name, column in fn(output, micro).items()}
                for micro in micros
                for output in [self.model.output(self.module, micro.input_ids)]
            ]
        return join_columns(answers, micros)

    def accumulate(
        self, micros: list[MicroBatch], loss: Loss, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """DDP averages over the ranks and a loss is a sum: hence the factor."""
        sums: dict[str, float | Tensor] = {}
        for number, micro in enumerate(micros):
            is_last = number == len(micros) - 1
            with contextlib.nullcontext() if is_last else self.ddp.no_sync():
                with self.precision():
                    output = self.model.output(self.ddp, micro.input_ids)
                value, metrics = loss(output, micro, totals)
                (value * self.layout.dp_size).backward()
            for name, x in {**metrics, "loss": value}.items():
                sums[name] = sums.get(name, 0.0) + x.detach().double()
        return self.dp_sums(sums)

    def gradient_norm(self) -> float:
        """The same on every rank, as the gradients are."""
        gradients = [w.grad for w in self.module.parameters() if w.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def update(self, norm: float) -> None:
        """Clip, step and forget the gradient."""
        assert self.optimizer is not None
        weights, limit = list(self.module.parameters()), self.optimizer.cfg.clip_norm
        torch.nn.utils.clip_grads_with_norm_(weights, limit, torch.tensor(norm))
        self.adamw.param_groups[0]["lr"] = self.optimizer.next_lr
        self.adamw.step()
        self.adamw.zero_grad()
        self.optimizer.steps_done += 1

    def blocks(self) -> Iterator[tuple[str, Tensor, Box]]:
        """Every tensor whole; tied ones once."""
        for name, weight in self.module.named_parameters():
            yield name, weight.detach(), Box.of_shape(weight.shape)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The same."""
        return ((name, tensor.float()) for name, tensor, _ in self.blocks())

    def shard_hashes(self, dtype: torch.dtype) -> dict[str, int]:
        """Of this rank's copy."""
        return {name: positional_hash(x.to(dtype), 0) for name, x, _ in self.blocks()}

    def state_blocks(self) -> dict[str, Tensor]:
        """Weights, moments and the number of steps."""
        found = {name: tensor for name, tensor, _ in self.blocks()}
        if self.optimizer is not None:
            for name, weight in self.module.named_parameters():
                state = self.adamw.state[weight]
                found |= {f"{name}.{moment}": state[moment] for moment in (*MOMENTS, "step")}
        return found

    def load_blocks(self, blocks: Mapping[str, Tensor]) -> None:
        """Back into the same tensors."""
        self.weights_version += 1
        for name, target in self.state_blocks().items():
            target.copy_(blocks[name])
        if self.optimizer is not None:
            self.optimizer.steps_done = int(next(iter(self.adamw.state.values()))["step"])

    def residency(self, where: Place, part: Part) -> None:
        """Everything stays on the device: engine.residency=offload has no effect."""

    def precision(self) -> torch.autocast:
        """The compute precision of model.dtype."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
