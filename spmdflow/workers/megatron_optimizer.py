"""Gradients and optimizer of one Megatron stage: DDP buffers, distributed or plain optimizer.

Gradients accumulate and are summed over dp in float32; masters and moments are float32. The
distributed optimizer steps 1/dp of every tensor on each rank and gathers the result (ZeRO stage
1, Rajbhandari et al. 2020); the plain one steps all of it everywhere. Megatron's own clipping,
schedules and Adam are not used: they are the same as in the other engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from spmdflow.blocks.box import Box, flat_range
from spmdflow.config.schema import OptimizerConfig
from spmdflow.weights import ranks
from spmdflow.weights.move import Block
from spmdflow.weights.ranks import part_name
from spmdflow.weights.table import LocalTensor, Piece
from spmdflow.workers.megatron_model import local_name
from spmdflow.workers.megatron_runtime import limit_object_gathers, megatron_runtime
from spmdflow.workers.optimizer import TorchOptimizer, clip_, split_groups, squared_norm

Adopt = Callable[[DistributedDataParallel, Mapping[Tensor, str]], None]
"""(DDP, local name of each parameter) -> None. Called after DDP has allocated its buffers and
before the optimizer is built: the last moment at which parameters can move to other storage
(buffer.param_data, bucket.param_data, parameter.data)."""


class StageOptimizer(TorchOptimizer):
    """DDP and optimizer around a stage's modules. Collective over the model's ranks."""

    def __init__(
        self,
        modules: Sequence[MegatronModule],
        cfg: OptimizerConfig,
        groups: ProcessGroupCollection,
        *,
        total_steps: int,
        distributed: bool,
        overlap: bool,
        adopt: Adopt | None,
        undecayed: Collection[str] = (),
    ) -> None:
        """undecayed: local names of tensors without weight decay.

        overlap: reduce gradients bucket by bucket during the last backward, and gather weights
        during the next forward, or in `gather`.
        """
        super().__init__(cfg, total_steps)
        self.distributed = distributed
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and distributed,
            bucket_size=ranks.OVERLAP_BUCKET if overlap else None,
        )
        self._is_behind = settings.overlap_param_gather
        self.ddps = [
            DistributedDataParallel(
                module.config, replace(settings), module, bool(part), pg_collection=groups
            )
            for part, module in enumerate(modules)
        ]
        """One for each part of the model."""
        config = modules[0].config
        many = len(modules)
        # sums over dp, tp and tied embeddings, not divided by a number of tokens
        config.finalize_model_grads_func = lambda model, tokens, **groups: finalize_model_grads(
            model, None, **groups
        )
        no_sync = [ddp.no_sync for ddp in self.ddps]
        config.no_sync_func = no_sync if many > 1 else no_sync[0]
        self._names = {
            p: part_name(part, local_name(name), many)
            for part, ddp in enumerate(self.ddps)
            for name, p in ddp.named_parameters()
        }
        if adopt is not None:
            (ddp,) = self.ddps
            adopt(ddp, self._names)
        with limit_object_gathers(groups.intra_dist_opt):
            chained = get_megatron_optimizer(
                _megatron_config(cfg, config, distributed=distributed),
                self.ddps,
                config_overrides={},  # one group; `_replace_adam` makes those of weight decay
                use_gloo_process_groups=False,
                pg_collection=groups,
            )
        self._inners = chained.chained_optimizers
        """Megatron's optimizers: one, and a second one if experts are divided over dp ranks."""
        self._replace_adam(undecayed)

    def gather(self) -> None:
        """All-gathers the updated weights now, if `step` left that to the next forward."""
        if self._is_behind:
            self._start_gather()

    def zero_gradients(self) -> None:
        """Set all gradients to zero. Called before the first micro-batch of a step."""
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        self._forget_gradients()

    def gradient_norm(self) -> float:
        """Return the L2 norm of the complete model's summed gradient, the same on every rank.

        Called once, after the last micro-batch, by all ranks of the model together. Megatron omits
        elements that another rank already counts: copies over tp, and the second copy of a tied
        embedding.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for inner in self._inners:
            inner.prepare_grads()
            square = squared_norm(_counted_gradients(inner), self._device)
            dist.all_reduce(square, group=inner.get_grad_stats_parallel_group())
            total += square
        return math.sqrt(float(total))

    def step(self, norm: float) -> None:
        """Clip the gradients by the global norm, step the weights, and zero the gradients.

        norm: as `gradient_norm` returned it, which must be called first. The rate is next_lr;
        steps_done increases by 1. With overlap, gathering the weights over dp is left to the next
        forward or to `gather`; otherwise the distributed optimizer gathers them here. All ranks of
        the model call it together.
        """
        clip_(
            [p.grad for p in self._stepped_parameters() if p.grad is not None],
            norm,
            self.cfg.clip_norm,
        )
        for group in self.inner.param_groups:
            group["lr"] = self.next_lr
        self.inner.step()
        self._round_weights()
        self._is_behind = self.ddps[0].ddp_config.overlap_param_gather
        if self.distributed and not self._is_behind:
            self._start_gather()
        self._forget_gradients()
        self.steps_done += 1

    def stepped_tensors(self) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """Yield the tensors that this rank steps, in a fixed order.

        Each is (Megatron's local name, index of the first element in the flattened local tensor,
        flat live float32 tensors by name: "" for the weights that are stepped, and the names of the
        moments). With the distributed optimizer each element is on one dp rank.
        """
        for parameter, main, start in self._mains():
            moments = {}
            for name, x in self.moments_at(main).items():
                moments[name] = x.view(-1)
            yield self._names[parameter], start, {"": main.detach().view(-1), **moments}

    def mark_restored(self, steps_done: int) -> None:
        """Set the number of steps done, after weights and moments were overwritten.

        See `Scheduled.mark_restored`. Copies the float32 masters of `stepped_tensors` to the
        model's weights. With the distributed optimizer it then gathers the weights over dp, which
        all ranks call together.
        """
        super().mark_restored(steps_done)
        with megatron_runtime():
            self._round_weights()
            if self.distributed:
                self._start_gather()

    def states(self) -> Iterator[Tensor]:
        """Yield all moments, and the float32 masters that do not share storage with weights."""
        weights = {p.untyped_storage()._cdata for p in self._names}
        for parameter in self._stepped_parameters():
            if parameter.untyped_storage()._cdata not in weights:
                yield parameter
        yield from self.moments()

    def gradients(self) -> list[Tensor]:
        """Return the gradient buffers of all parts. They stay allocated between steps."""
        result = []
        for ddp in self.ddps:
            for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
                result.append(buffer.grad_data)
        return result

    def _replace_adam(self, undecayed: Collection[str]) -> None:
        """Replace Megatron's Adam by the configured class of torch.optim, on the same tensors.

        Tensors in undecayed (local names) get a second parameter group without weight decay. Sets
        `inner` and allocates the state.
        """
        stepped = []
        for megatron in self._inners:
            own = []
            for group in megatron.optimizer.param_groups:
                own += group["params"]
            megatron.optimizer = _Parameters([{"params": own}])
            stepped += own
        inner = self.torch_class([nn.Parameter(torch.zeros(0))], **self.arguments)
        inner.param_groups[0]["params"] = stepped  # add_param_group refuses views of parameters
        self.inner = inner
        if undecayed:
            mains = []
            for weight, main, _ in self._mains():
                mains.append((self._names[weight], main))
            undecayed_mains = []
            for name, main in mains:
                if name in undecayed:
                    undecayed_mains.append(main)
            defaults = inner.param_groups.pop()
            inner.param_groups += [
                defaults | group for group in split_groups(stepped, undecayed_mains)
            ]
        self.use(inner)

    def _round_weights(self) -> None:
        """Copy the float32 masters to the model's weights, where these are others."""
        for inner in self._inners:
            if hasattr(inner, "_copy_main_params_to_model_params"):
                inner._copy_main_params_to_model_params()

    def _forget_gradients(self) -> None:
        for inner in self._inners:
            inner.zero_grad()

    def _start_gather(self) -> None:
        for ddp in self.ddps:
            ddp.start_param_sync(force_sync=True)
        self._is_behind = False

    def _stepped_parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups that the optimizer steps."""
        result = []
        for group in self.inner.param_groups:
            for p in group["params"]:
                result.append(p)
        return result

    def _mains(self) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
        """Yield (model parameter, float32 tensor that is stepped, its offset in the parameter).

        The offset is in the flattened parameter. With the distributed optimizer the tensors are
        this rank's ranges, otherwise complete (offset 0). In float32 without it they are the
        parameters themselves.
        """
        if not self.distributed and not hasattr(self._inners[0], "float16_groups"):
            yield from ((weight, weight, 0) for weight in self._stepped_parameters())
            return
        for inner in self._inners:
            yield from self._mains_of(inner)

    def _mains_of(self, inner: Any) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
        """`_mains` of one of Megatron's optimizers, which has float32 masters."""
        if self.distributed:
            weights = _flatten_groups(inner.model_fp32_groups) + _flatten_groups(
                inner.model_float16_groups
            )
            mains = _flatten_groups(inner.shard_fp32_groups)
            mains += _flatten_groups(inner.shard_fp32_from_float16_groups)
            for weight, main in zip(weights, mains, strict=True):
                yield weight, main, inner._get_model_param_range_map(weight)["param"].start
        else:
            weights = _flatten_groups(inner.float16_groups) + _flatten_groups(
                inner.fp32_from_fp32_groups
            )
            mains = _flatten_groups(inner.fp32_from_float16_groups) + _flatten_groups(
                inner.fp32_from_fp32_groups
            )
            yield from ((weight, main, 0) for weight, main in zip(weights, mains, strict=True))

    @property
    def _device(self) -> torch.device:
        return next(iter(self._names)).device


@dataclass
class _Parameters:
    """What each of Megatron's optimizers has in place of its Adam: the tensors that it counts."""

    param_groups: list[dict[str, Any]]


def _counted_gradients(inner: Any) -> list[Tensor]:
    """The gradients of one of Megatron's optimizers that no other rank counts in the norm."""
    names = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")  # 0.19, 0.16
    gradients: Callable[[], list[Tensor]] = next(
        getattr(inner, name) for name in names if hasattr(inner, name)
    )
    return gradients()


def _megatron_config(
    cfg: OptimizerConfig, model: Any, *, distributed: bool
) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=cfg.lr,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.betas[0],
        adam_beta2=cfg.betas[1],
        clip_grad=0.0,  # clipped here
        bf16=model.bf16,
        params_dtype=model.params_dtype,
        use_distributed_optimizer=distributed,
    )


def _flatten_groups(groups: list[list[Any]]) -> list[Any]:
    """Join lists of tensors to one list."""
    result = []
    for group in groups:
        for tensor in group:
            result.append(tensor)
    return result


def flat_blocks(tensor: LocalTensor, flat: Tensor, start: int) -> Iterator[Block]:
    """Yield (name, live view, its box of the complete tensor) for a range of a flattened tensor.

    flat has elements start, start + 1, ... of the flattened local tensor. The range is cut into
    boxes within the pieces of complete tensors that the local tensor consists of; padding is
    skipped.
    """
    for local in flat_range(tensor.shape, start, start + flat.numel()):
        values = flat[: local.size].view(local.shape)
        flat = flat[local.size :]
        for piece in tensor.pieces:
            common = piece.local.intersect(local)
            if common is not None:
                part = Piece(
                    piece.name, piece.box_at(common), Box.of_shape(common.shape), piece.axes
                )
                yield part.name, part.view(values[common.slices(local)]), part.box
