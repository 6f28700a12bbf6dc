"""Which hardware a plan is for, and which ranks share a machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from spmdflow.mapping.machine import Hardware, load_hardware

_BY_DEVICE = {"A100": "a100_80gb", "H100": "h100", "H200": "h200"}


def hardware_of(
    name: str | None, node_size: int | None = None, *, world_size: int | None = None
) -> Hardware:
    """The named hardware, or this machine's kind. ConfigError if there is no such hardware.

    node_size: ranks that share a machine; without it the hardware's, on CPUs all of the world. The
    rates of a file of processors hold for as many ranks at once as were measured: more share them.
    """
    hardware = load_hardware(name or _own())
    if is_cpu(hardware):
        hardware = replace(hardware, cores=hardware.gpus_per_node)
    if node_size is None and is_cpu(hardware):
        node_size = world_size
    return hardware if node_size is None else hardware.with_node(node_size)


def is_cpu(hardware: Hardware) -> bool:
    """Whether ranks are plain processes on processors."""
    return hardware.name.startswith("cpu")


def nodes_of(world: tuple[int, ...], hardware: Hardware) -> tuple[int, ...]:
    """The machine of each rank."""
    return tuple(rank // int(hardware.gpus_per_node) for rank in world)


def _own() -> str:
    """The packaged file of the device at hand."""
    if not torch.cuda.is_available():
        return "cpu"
    device = torch.cuda.get_device_name()
    return next((name for key, name in _BY_DEVICE.items() if key in device), "a100_80gb")
