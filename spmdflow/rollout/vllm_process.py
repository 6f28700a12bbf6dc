"""vLLM beside a trainer in one process: what it changes is put back, and what CUDA needs.

vLLM reseeds the random states, sets environment variables and, on CPU, replaces functions of
torch. What it needs on CUDA was read in 0.32 and never run.
"""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch

_REPLACED_IN_TORCH: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch, ("Event", "set_num_threads")),
    (torch.cuda, ("Event", "Stream", "set_stream", "current_stream", "stream")),
    (torch.Tensor, ("pin_memory", "record_stream")),
)
"""Functions that vLLM replaces on CPU for the whole process, though it works without that.

Those of torch.accelerator stay replaced: on CPU the originals only raise, and shutdown calls them.
On CUDA vLLM replaces torch.cuda.set_stream to know the stream that it launches on: that stays.
"""


CUDA_SETTINGS: dict[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.01}
"""Of vllm.LLM. The fraction is only a check of free memory here, and a trainer holds most of it:
kv_cache_memory_bytes says what the engine takes."""


@contextmanager
def process_state_kept(*, own_variables: str) -> Iterator[None]:
    """Random states, threads, environment and torch's functions are afterwards as before.

    Environment variables that begin with own_variables stay as they were set meanwhile. Nothing
    is garbage-collected meanwhile: that is a fifth of the time to import vLLM and build an engine.
    """
    with ExitStack() as stack:
        stack.callback(_restore_environment, dict(os.environ), own_variables)
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if torch.cuda.is_available():
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state())
        for owner, names in () if torch.cuda.is_available() else _REPLACED_IN_TORCH:
            for name in names:
                stack.callback(setattr, owner, name, getattr(owner, name))
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is value inside the block."""
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


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


def _restore_environment(before: dict[str, str], own_variables: str) -> None:
    for name in set(os.environ) | set(before):
        if name.startswith(own_variables):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
