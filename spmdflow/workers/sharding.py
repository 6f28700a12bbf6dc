"""Cutting a loaded module into FSDP2 shards, and where a shard lies in its tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from spmdflow.config.schema import EngineConfig
from spmdflow.workers.hugging_face import LoadedModel


def shard_model(
    model: LoadedModel, cfg: EngineConfig, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Shard model.module in place over group: one unit per decoder layer, one for the rest.

    Master parameters stay float32; a unit is gathered in model.dtype and its gradients are
    summed in float32. Backward *sums* over the group: losses are divided by global totals.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    mixed = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    reshard = cfg.reshard_after_forward
    for layer in model.layers:
        if cfg.recompute:
            recompute_in_backward(layer)
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
    for part in model.float32_modules:
        fully_shard(part, mesh=mesh, mp_policy=exact, reshard_after_forward=reshard)
    fully_shard(model.module, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
    for unit in units(model.module):
        # a plain sum; without the second line gloo is asked for PREMUL_SUM, which it lacks
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def recompute_in_backward(layer: nn.Module) -> None:
    """Keep only the layer's input in forward and compute the rest again in backward.

    The forward is wrapped inside the FSDP unit (whose hooks then run once) and parameter names
    stay as they are. No random numbers are drawn: models run without dropout.
    """
    again = functools.partial(
        checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
    )
    layer.forward = again  # type: ignore[method-assign, assignment]


def units(module: nn.Module) -> Iterator[FSDPModule]:
    """Every FSDP unit of a sharded module, the root included."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


@dataclass(frozen=True)
class Shard:
    """This rank's rows of one parameter: chunk r of torch.chunk over dimension 0."""

    parameter: DTensor

    @property
    def local(self) -> Tensor:
        """The rows held here, sharing storage with the parameter; may be empty."""
        return self.parameter.to_local().detach()

    @property
    def gradient(self) -> Tensor | None:
        """The rows' gradient, summed over the group; None outside a train step."""
        gradient = self.parameter.grad
        return gradient.to_local() if isinstance(gradient, DTensor) else None

    @property
    def offset(self) -> int:
        """Flat index in the whole tensor of the first element held here."""
        mesh, shape = self.parameter.device_mesh, self.parameter.shape
        rows = -(-shape[0] // mesh.size())  # torch.chunk: all chunks but the last ones are full
        start = min(mesh.get_local_rank() * rows, shape[0])
        return start * (shape.numel() // shape[0])

    def full(self) -> Tensor:
        """The whole tensor in float32, on every rank (all-gather over the group)."""
        with torch.no_grad():
            return self.parameter.full_tensor().float()


def shards(module: nn.Module) -> dict[str, Shard]:
    """Shards by Hugging Face name; a tied parameter appears once, under its first name."""
    found = dict(module.named_parameters())
    wrong = [name for name, parameter in found.items() if not isinstance(parameter, DTensor)]
    assert not wrong, f"gathered parameters {wrong[:3]}: reshard before looking at shards"
    return {name: Shard(parameter) for name, parameter in found.items()}  # type: ignore[arg-type]
