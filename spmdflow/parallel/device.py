"""Chooses the device of this process, and the backend of process groups on such devices.

It is any accelerator that torch supports, or the CPU if there is none. No other module chooses it.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")
_CPU_FACTS = Path("/proc/cpuinfo")
_ALIGNED = 16
"""Alignment in bytes: kernels read several elements at once."""


def own_device() -> torch.device:
    """Return the current accelerator of this process, with its index; the CPU if it has none.

    The CPU also replaces MPS, which has no float64, in which metrics are summed.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":
        return CPU
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_uuid() -> str:
    """Return the UUID of this process's device, equal in all processes that use it.

    It does not depend on CUDA_VISIBLE_DEVICES. Empty on a CPU, or if torch does not know it.
    """
    device = own_device()
    if device == CPU:
        return ""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


def device_name() -> str:
    """Return the name of this process's accelerator, as its driver knows it.

    Of a CPU: "CPU: " and its model, or the machine's architecture if the model is unknown.
    """
    device = own_device()
    if device != CPU:
        return str(torch.get_device_module(device).get_device_name(device))
    try:
        lines = _CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return f"CPU: {value.strip()}"
    return f"CPU: {platform.machine()}"


def backend_of(device: torch.device) -> str:
    """Backend of process groups that exchange tensors of such devices: gloo, nccl, xccl, ..."""
    return dist.get_default_backend_for_device(device)


def to_device(column: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, from pinned memory, so that the host does not wait.

    A tensor for the CPU is returned as it is. An empty tensor is not pinned.
    """
    if device == CPU:
        return column
    if not column.numel():  # nothing to copy
        return torch.empty_like(column, device=device)
    return column.pin_memory().to(device, non_blocking=True)


def all_to_device(columns: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to the device in a single transfer, without waiting for it.

    The results are views of one buffer, with the tensors' dtypes and shapes. For the CPU the same
    tensors are returned.
    """
    if device == CPU:
        return list(columns)
    sizes = []
    for column in columns:
        sizes.append(-(-column.nbytes // _ALIGNED) * _ALIGNED)
    joined = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)

    def parts(packed: Tensor) -> list[Tensor]:
        """Return a view of the packed bytes for each column, with the column's dtype and shape.

        `.data` gives each view its own version counter.
        """
        pairs = zip(packed.split(sizes), columns, strict=True)
        result = []
        for each, x in pairs:
            result.append(each[: x.nbytes].view(x.dtype).view(x.shape).data)
        return result

    for part, column in zip(parts(joined), columns, strict=True):
        part.copy_(column)
    return parts(joined.to(device, non_blocking=True))


def take_peak_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on an accelerator since the previous call, in bytes.

    As torch's allocator counts them: without its unused blocks and without the memory of other
    libraries. Resets torch's peak statistics of the device (`reset_peak_memory_stats`). On a CPU
    there is `allocated.AllocatedPeak` instead.
    """
    memory = torch.get_device_module(device)
    peak: int = memory.max_memory_allocated(device)
    memory.reset_peak_memory_stats(device)
    return peak


def to_host(column: Tensor) -> Tensor:
    """Return a copy in pinned host memory, valid after the host has waited for the device.

    A CPU tensor is returned as it is.
    """
    if column.device == CPU:
        return column
    copy = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
    return copy.copy_(column, non_blocking=True)
