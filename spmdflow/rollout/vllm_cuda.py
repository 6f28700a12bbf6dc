"""What vLLM needs on CUDA only, beside a trainer in the same process. Read in 0.32, never run."""

from __future__ import annotations

import os
import socket
from importlib import import_module
from typing import Any

import torch

SETTINGS: dict[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.01}
"""Of vllm.LLM. The fraction is only a check of free memory here, and a trainer holds most of it:
kv_cache_memory_bytes says what the engine takes."""


def keep_caches_apart(device: torch.device) -> None:
    """Compiled code belongs to one device, and vLLM's cache tells engines apart by rank alone.

    Before an engine is built; every replica's ranks count from 0.
    """
    root, leaf = (
        import_module("vllm.envs").VLLM_CACHE_ROOT,
        f"{socket.gethostname()}-{device.index}",
    )
    if os.path.basename(root) != leaf:
        os.environ["VLLM_CACHE_ROOT"] = os.path.join(root, leaf)


def trim_weights() -> None:
    """Have vLLM's sleep allocator give back the memory of weights that are gone.

    Their blocks return to a private pool, which torch keeps as long as the pool lives.
    """
    allocator = import_module("vllm.device_allocator").get_mem_allocator_instance()
    if hasattr(allocator, "_trim"):
        for pool, _ in allocator.allocator_and_pools.get("weights", ()):
            allocator._trim(pool)
