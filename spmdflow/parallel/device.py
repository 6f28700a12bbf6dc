"""Which device this process computes on, and the backend that joins such devices.

Any kind of accelerator that torch knows; where there is none, the CPU. No other module chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")
_ALIGNED = 16
"""Bytes; kernels read several elements at once."""


def own_device() -> torch.device:
    """The current accelerator of this process, with its index; the CPU if it has none.

    MPS does not count: it has no float64, in which metrics are summed.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "mps":
        return CPU
    return torch.device(found.type, torch.accelerator.current_device_index())


def backend_of(device: torch.device) -> str:
    """Backend of process groups that exchange tensors of such devices: gloo, nccl, xccl, ..."""
    return dist.get_default_backend_for_device(device)


def to_device(column: Tensor, device: torch.device) -> Tensor:
    """A tensor of host memory on the device: from pinned memory, so that the host does not wait."""
    if device == CPU:
        return column
    if not column.numel():  # nothing to copy
        return torch.empty_like(column, device=device)
    return column.pin_memory().to(device, non_blocking=True)


def all_to_device(columns: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of host memory on the device, all in one copy."""
    if device == CPU:
        return list(columns)
    sizes = []
    for column in columns:
        sizes.append(-(-column.nbytes // _ALIGNED) * _ALIGNED)
    joined = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)

    def parts(whole: Tensor) -> list[Tensor]:  # .data: own version counters
        pairs = zip(whole.split(sizes), columns, strict=True)
        result = []
        for each, x in pairs:
            result.append(each[: x.nbytes].view(x.dtype).view(x.shape).data)
        return result

    for part, column in zip(parts(joined), columns, strict=True):
        part.copy_(column)
    return parts(joined.to(device, non_blocking=True))


def to_host(column: Tensor) -> Tensor:
    """A copy in pinned host memory, valid once the host has waited for the device; CPU: itself."""
    if column.device == CPU:
        return column
    found = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
    return found.copy_(column, non_blocking=True)
