# ddp_engine.py
"""An engine of a user: DistributedDataParallel, every rank with the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from spmdflow import (
    EngineKind,
    EngineOption,
    OptimizerConfig,
    Sharding,
    WorkerContext,
    register_engine,
)
from spmdflow.blocks.box import Box
from spmdflow.config.schema import EngineConfig
from spmdflow.objectives.loss import Loss
from spmdflow.workers.engine import ForwardFn, Part, Place, TrainEngine
from spmdflow.workers.micro_batch import MicroBatch
from spmdflow.workers.model import LoadedModel
from spmdflow.workers.optimizer import TorchOptimizer
from spmdflow.workers.sharding import read_weights


@register_engine(
    EngineKind(
        "ddp",
        "DistributedDataParallel: everything whole on every rank",
        # no rank divides anything; each step all-reduces the gradients, which is two reductions
        Sharding(optimizer=False, reductions=2),
        options={"bucket_view": EngineOption("gradients are views into DDP's buckets")},
        packs=True,  # the module does: it is given whole micro-batches
    )
)
class DDPEngine(TrainEngine):
    """Gradients are summed by DDP's buckets, in the last backward of a step."""

    model: LoadedModel
    optimizer: TorchOptimizer | None = None

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
        self.module = read_weights(model, self.device)
        if optimizer is None:
            self.module.requires_grad_(False)
            return
        self.optimizer = TorchOptimizer(optimizer, total_optimizer_steps)
        self.ddp = DistributedDataParallel(
            self.module,
            process_group=self.dp_group,
            gradient_as_bucket_view="bucket_view" in cfg.options,
        )
        steps = self.optimizer.torch_class(self.module.parameters(), **self.optimizer.arguments)
        self.optimizer.use(steps)  # makes its moments: checkpoints look alike from the start

    def outputs(self, micros: list[MicroBatch], fn: ForwardFn) -> list[Mapping[str, Tensor]]:
        """What fn gives for each micro-batch."""
        with self.precision():
            return [self.module(micro, fn) for micro in micros]

    def accumulate(
        self, micros: list[MicroBatch], loss: Loss, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """DDP averages over the ranks and a loss is a sum: hence the factor."""
        sums: dict[str, float | Tensor] = {}
        for number, micro in enumerate(micros):
            is_last = number == len(micros) - 1
            with contextlib.nullcontext() if is_last else self.ddp.no_sync():
                with self.precision():
                    value, metrics = self.ddp(
                        micro, lambda output, rows: loss(output, rows, totals)
                    )
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
        weights = list(self.module.parameters())
        limit = self.optimizer.cfg.clip_norm
        torch.nn.utils.clip_grads_with_norm_(weights, limit, torch.tensor(norm))
        self.optimizer.inner.param_groups[0]["lr"] = self.optimizer.next_lr
        self.optimizer.inner.step()
        self.forget_gradient()
        self.optimizer.steps_done += 1

    def forget_gradient(self) -> None:
        """After a step, and instead of one that `optimizer.skip_nonfinite` skips."""
        self.module.zero_grad()

    def blocks(self) -> Iterator[tuple[str, Tensor, Box]]:
        """Every tensor whole; tied ones once."""
        for name, weight in self.module.named_parameters():
            yield name, weight.detach(), Box.of_shape(weight.shape)

    def state_blocks(self) -> Iterator[tuple[str, Tensor, Box]]:
        """Weights and moments."""
        yield from self.blocks()
        for name, weight in self.module.named_parameters() if self.optimizer else ():
            for moment, values in self.optimizer.moments_at(weight).items():
                yield f"{name}.{moment}", values, Box.of_shape(values.shape)

    def residency(self, where: Place, part: Part) -> None:
        """Everything stays on the device: engine.offload has no effect."""

    def precision(self) -> torch.autocast:
        """The compute precision of model.dtype."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
