"""`Ledger`: bytes of tensors that are alive on the device, and the lines that made them."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATED = 512
"""Torch's allocator gives multiples of it."""


class Ledger(TorchDispatchMode):
    """Bytes of all storages on the device that are alive, their peak, and the lines that made
    those of the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held: dict[int, tuple[int, str, Any]] = {}
        self._by_line: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()

    def begin(self) -> None:
        """From here on it is the peak of another phase."""
        self.peak = self.now
        self.at_peak = self._by_line.copy()

    def add(self, tensor: torch.Tensor, line: str) -> None:
        """Count a tensor's storage, if it lies on the device and is not yet counted."""
        if tensor.device.type != "cuda":
            return
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = tensor.untyped_storage()
        if id(storage) not in self._held:
            gone = partial(self._free, id(storage))
            self._held[id(storage)] = (0, line, weakref.ref(storage, gone))
        self._resize(id(storage), storage.nbytes())

    def _free(self, key: int, _: Any) -> None:
        self._resize(key, 0)

    def _resize(self, key: int, num_bytes: int) -> None:
        before, line, gone = self._held.pop(key)
        size = -(-num_bytes // ALLOCATED) * ALLOCATED
        if gone() is not None:
            self._held[key] = (size, line, gone)
        self.now += size - before
        self._by_line[line] += size - before
        if self.now > self.peak:
            self.peak = self.now
            self.at_peak = self._by_line.copy()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        line = f"{func.__name__} {_place(sys._getframe(1))}"
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, line)
        return out

    @contextmanager
    def counting_resizes(self) -> Iterator[None]:
        """FSDP frees and takes back memory by resizing storages, which is no operator."""
        stock = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = stock(storage, size)
            if id(storage) in self._held:
                self._resize(id(storage), storage.nbytes())
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = stock  # type: ignore[method-assign]


_FOLDERS = ("/spmdflow/", "/_fully_shard/", "/models/llama/", "/megatron/core/")


def _place(frame: FrameType | None) -> str:
    """The innermost line of an engine or a model; empty in a backward pass."""
    while frame is not None:
        name = frame.f_code.co_filename
        for folder in _FOLDERS:
            if folder in name:
                return f"{name[name.rfind(folder) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
