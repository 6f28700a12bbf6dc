"""Keeping a process as it is while a library that wants it for itself is started in it.

vLLM reseeds the random states, sets environment variables and, on CPU, replaces functions of
torch. Knows no vLLM.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


def _restore_environment(before: dict[str, str], own_variables: str) -> None:
    for name in set(os.environ) | set(before):
        if name.startswith(own_variables):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
