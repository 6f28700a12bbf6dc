"""Which hardware a plan is for, and which ranks share a machine."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from spmdflow.errors import ConfigError
from spmdflow.mapping.machine import Hardware, load_hardware

_BY_DEVICE = {
    r"\bA100\b.*\b80GB\b": "a100_80gb",
    r"\bH100\b(?!.*\b(PCIe|NVL|MIG)\b)": "h100",
    r"\bH200\b(?!.*\b(NVL|MIG)\b)": "h200",
}
"""Packaged files by what CUDA calls the device: cards of other memory or links are other kinds."""


def hardware_of(
    name: str | None, node_size: int | None = None, *, world_size: int | None = None
) -> Hardware:
    """The named hardware, or this machine's kind. ConfigError if there is no such hardware.

    node_size: ranks that share a machine; without it the hardware's, on CPUs all of the world. The
    rates and memory of a file of processors hold for as many ranks as were measured: more share
    them.
    """
    hardware = load_hardware(name or _own())
    if not is_cpu(hardware):
        return hardware if node_size is None else hardware.with_node(node_size)
    cores = hardware.gpus_per_node
    ranks = next((n for n in (node_size, world_size) if n is not None), int(cores))
    share = cores / max(ranks, cores)
    shared = replace(hardware, cores=cores, memory_bytes=share * hardware.memory_bytes)
    return shared.with_node(ranks)


def is_cpu(hardware: Hardware) -> bool:
    """Whether ranks are plain processes on processors."""
    return hardware.name.startswith("cpu")


def nodes_of(world: tuple[int, ...], hardware: Hardware) -> tuple[int, ...]:
    """The machine of each rank."""
    return tuple(rank // int(hardware.gpus_per_node) for rank in world)


def _own() -> str:
    """The packaged file of the device at hand; ConfigError if there is none."""
    if not torch.cuda.is_available():
        return "cpu"
    device = torch.cuda.get_device_name()
    for pattern, name in _BY_DEVICE.items():
        if re.search(pattern, device):
            return name
    raise ConfigError(
        f"hardware: got {device}, expected a device that a packaged file describes "
        f"({', '.join(_BY_DEVICE.values())}); measure it with scripts/calibrate.py --device cuda "
        f"and set run.hardware (of a plan: --hardware) to that file, or to the nearest of these"
    )
