"""Cuts a module into FSDP2 shards, reads their weights, and locates their rows in the tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from spmdflow.blocks.box import Box
from spmdflow.kind.engine import Sharding
from spmdflow.weights.adapter import adapter_names, is_adapter, is_b
from spmdflow.weights.move import Block, copy_box
from spmdflow.weights.table import chunk_box
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.divided_experts import SHARE, ExpertShare
from spmdflow.workers.model import LoadedModel

UNIT_BYTES = 4 << 20
"""Minimum bytes of the layers that are gathered together, in compute precision."""


def mesh_of(sharding: Sharding, context: WorkerContext) -> DeviceMesh:
    """Return the mesh of the pool: (all its ranks,), or (replicate, shard).

    The second form if shards are on a part of the pool: the layout's shard_size neighbours, or 1 if
    parameters are not divided. torch treats meshes of equal ranks and axis names as the same mesh.
    The pool's group name in the axis names distinguishes this mesh from a host program's, or from
    an earlier launch's.
    """
    layout = context.layout
    device = context.device.type
    pool = context.groups.get(layout.ranks)
    shard = f"shard-{pool.group_name}"
    replicate = f"replicate-{pool.group_name}"
    if not sharding.parameters:
        layout = replace(layout, shard_size=1)
    elif layout.shard_size == layout.size:
        return DeviceMesh.from_group(pool, device, mesh_dim_names=(shard,))
    axes = []
    for axis in ("replicate", "shard"):
        axes.append(layout.axis_group(context.rank, axis))
    return DeviceMesh.from_group(
        [context.groups.get(ranks) for ranks in axes],
        device,
        mesh=torch.tensor(layout.ranks).view(-1, layout.shard_size),
        mesh_dim_names=(replicate, shard),
    )


def expert_mesh_of(context: WorkerContext) -> DeviceMesh:
    """Return the mesh of the ranks with the same experts as this rank, if experts are divided."""
    pool = context.groups.get(context.layout.ranks)
    ranks = context.layout.axis_group(context.rank, "expert_dp")
    return DeviceMesh.from_group(
        context.groups.get(ranks),
        context.device.type,
        mesh_dim_names=(f"experts-{ranks[0]}-{pool.group_name}",),
    )


@dataclass(frozen=True)
class DividedExperts:
    """Modules of experts that are divided over ranks, and the mesh of those with the same ones."""

    modules: Sequence[nn.Module]
    mesh: DeviceMesh


def shard_model(
    model: LoadedModel,
    sharding: Sharding,
    mesh: DeviceMesh,
    experts: DividedExperts | None = None,
) -> None:
    """Shard model.module in place over the mesh with FSDP2.

    Each group of `unit_layers` is one unit, each float32 module is one, and the remainder of the
    module is one. Divided experts are units of their own, over their mesh.
    Units are gathered in model.dtype; master parameters stay float32, and gradients are summed in
    float32. Backward sums over the mesh instead of averaging, because losses are
    divided by global totals. On a CPU the inputs of a layer are not cast to model.dtype, because
    only products are in bfloat16 there (cpu.product). All ranks of the mesh call it together.
    """
    summed = torch.promote_types(model.dtype, torch.float32)
    mixed = MixedPrecisionPolicy(
        param_dtype=model.dtype,
        reduce_dtype=summed,
        cast_forward_inputs=mesh.device_type != "cpu",
    )
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    reshard = _reshards(sharding)
    if experts is not None:
        for part in experts.modules:
            fully_shard(part, mesh=experts.mesh, mp_policy=mixed, reshard_after_forward=reshard)
    for layers in unit_layers(model.layers, model.dtype):
        fully_shard(layers, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
    for part in model.float32_modules:
        fully_shard(part, mesh=mesh, mp_policy=exact, reshard_after_forward=reshard)
    # the root's backward begins where its forward ends: it is not gathered a second time for that
    fully_shard(model.module, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    for unit in units(model.module):
        # a plain sum; without the second line FSDP uses PREMUL_SUM, which gloo lacks
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def unit_layers(layers: Sequence[nn.Module], dtype: torch.dtype) -> list[list[nn.Module]]:
    """Group adjacent layers into units, as few layers in each as reach `UNIT_BYTES` in dtype.

    The last unit may be smaller. [] without layers.
    """
    groups: list[list[nn.Module]] = []
    size = UNIT_BYTES
    for layer in layers:
        if size >= UNIT_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(layer)
        size += sum(parameter.numel() for parameter in layer.parameters()) * dtype.itemsize
    return groups


def read_weights(model: LoadedModel, device: torch.device) -> nn.Module:
    """Read the weights of model.module onto a device, and return the module.

    Of a sharded module only this rank's rows are read. A module that already has its weights is
    only moved, or left as it is if it is sharded. Tied parameters stay tied.
    """
    if model.read is None:
        if isinstance(model.module, FSDPModule):
            return model.module
        return model.module.to(device)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied parameters stay one
    try:
        model.module._apply(
            lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device)
        )
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    with torch.no_grad():
        for name, shard in shards(model.module).items():
            parameter = shard.parameter
            if isinstance(parameter, DTensor):
                copy_box(shard.local, name, shard.box, model.read)
            else:
                copy_box(parameter, name, Box.of_shape(parameter.shape), model.read)
    return model.module


def set_last_micro_batch(root: nn.Module, sharding: Sharding, *, last: bool) -> None:
    """Tell FSDP whether the next micro-batch is the step's last one. Called before each.

    Reductions that can be deferred run only in the last one: the all-reduce between groups of
    shards if the kind reduces in every micro-batch, otherwise all reductions. If layers stay
    gathered through a step, they are freed after the last. Does nothing for a module that is not
    sharded.
    """
    if not isinstance(root, FSDPModule):
        return
    if sharding.micro_batch_reductions:
        root.set_requires_all_reduce(last)  # between groups of shards, where there are several
    else:
        root.set_requires_gradient_sync(last)
    if not _reshards(sharding):
        root.set_reshard_after_backward(last)


def _reshards(sharding: Sharding) -> bool:
    """Whether a layer's copy in compute precision is freed between forward and backward."""
    return sharding.frees_gathered or not sharding.parameters


def recompute_in_backward(model: LoadedModel) -> None:
    """Make layers store only their inputs in forward, and recompute the remainder in backward.

    Replaces layer.forward in place, before layers become FSDP units (whose hooks then run once).
    Parameter names do not change. No random numbers are drawn: models run without dropout.
    """
    for layer in model.layers:
        again = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
        layer.forward = again  # type: ignore[method-assign, assignment]


def units(module: nn.Module) -> Iterator[FSDPModule]:
    """Every FSDP unit of a sharded module, including the root."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


@dataclass(frozen=True)
class Shard:
    """This rank's rows of one parameter: chunk r of torch.chunk over dimension 0, or all rows if
    the module is not sharded. Of divided experts: of the rows of its group."""

    parameter: nn.Parameter | DTensor
    experts: ExpertShare | None = None
    """Which rows of the complete tensor the parameter has; None: all."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the complete tensor."""
        shape = self.parameter.shape
        if self.experts is None:
            return shape
        return torch.Size((self.experts.num_experts, *shape[1:]))

    @property
    def local(self) -> Tensor:
        """This rank's rows, sharing storage with the parameter. May be empty."""
        parameter = self.parameter
        return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()

    def full_tensor(self) -> Tensor:
        """Return all rows of the parameter. Collective over the ranks that share them.

        If the module is not sharded, this is the parameter itself, detached.
        """
        parameter = self.parameter.detach()
        if isinstance(parameter, DTensor):
            return parameter.full_tensor()
        return parameter

    @property
    def gradient(self) -> Tensor | None:
        """Gradient of this rank's rows, summed over the group; None if there is none."""
        gradient = self.parameter.grad
        if isinstance(gradient, DTensor):
            return gradient.to_local()
        return gradient

    @property
    def box(self) -> Box:
        """Box of this rank's rows in the complete tensor.

        With n shards of R rows, rank r has rows r c to (r + 1) c - 1, c = ceil(R / n); the last
        ones may have fewer or none.
        """
        if not isinstance(self.parameter, DTensor):
            return Box.of_shape(self.parameter.shape)
        mesh = self.parameter.device_mesh
        size = mesh.size(mesh.ndim - 1)
        rank = mesh.get_local_rank(mesh.ndim - 1)
        first = 0 if self.experts is None else self.experts.first
        return chunk_box(self.shape, first, self.parameter.shape[0], rank, size)


def merged_adapter_blocks(
    shards_by_name: Mapping[str, Shard],
    *,
    scale: float,
    dtype: torch.dtype,
    count: Callable[[int], None],
) -> Iterator[Block]:
    """Yield (name, rows, box) of every weight, with adapters merged: W + scale B A.

    Weights without an adapter are live; merged ones are new tensors of this dtype, computed in
    float32. B has the same rows as W. A is gathered completely, and `count` gets the bytes
    received. All ranks that share the rows call it together.
    """
    for name, shard in shards_by_name.items():
        a, b = adapter_names(name)
        if a in shards_by_name:
            full_a = shards_by_name[a].full_tensor()
            count(full_a.nbytes - shards_by_name[a].local.nbytes)
            change = shards_by_name[b].local.float() @ full_a.float()
            summed = torch.add(shard.local.float(), change, alpha=scale)
            yield name, summed.to(dtype), shard.box
        elif not is_adapter(name):
            yield name, shard.local, shard.box


def separate_adapter_blocks(
    shards_by_name: Mapping[str, Shard], *, scale: float
) -> Iterator[Block]:
    """Rows of every weight and every A, live, and of scale B, new: the form in which generators add
    adapters."""
    for name, shard in shards_by_name.items():
        yield name, shard.local * scale if is_b(name) else shard.local, shard.box


def shards(module: nn.Module) -> dict[str, Shard]:
    """Return the shards by Hugging Face name. A tied parameter occurs once, under its first name.

    The parameters of an FSDP module must not be gathered.
    """
    parameters = dict(module.named_parameters())
    if isinstance(module, FSDPModule):
        gathered = []
        for name, parameter in parameters.items():
            if not isinstance(parameter, DTensor):
                gathered.append(name)
        assert not gathered, f"gathered parameters {gathered[:3]}: reshard before looking at shards"
    shares = {}
    for prefix, part in module.named_modules():
        share = getattr(part, SHARE, None)
        if share is not None:
            for name, _ in part.named_parameters(recurse=False):
                shares[f"{prefix}.{name}"] = share
    result = {}
    for name, parameter in parameters.items():
        result[name] = Shard(parameter, shares.get(name))
    return result


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a model's files, by name, such as a router's balance bias.

    Every rank has them whole; no optimizer steps them.
    """
    result = {}
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                result[f"{prefix}.{name}".removeprefix(".")] = buffer
    return result
