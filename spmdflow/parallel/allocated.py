"""Bytes that this process has allocated from the C library, and their peak. Imports no torch.

On a CPU this is what torch's allocator counts on a device: tensors count from their allocation to
their end, whether or not their pages are used, and memory that the library keeps for later does not
count. Neither do mapped files, such as weights that safetensors reads. glibc only.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

_PAUSE_SECONDS = 0.01


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and newer, in bytes."""

    _fields_ = [
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


_mallinfo2: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _MallInfo


def _allocated_bytes() -> int:
    """Return the bytes of all allocations that were not freed."""
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


class _Watch(threading.Thread):
    """Looks at `_allocated_bytes` every 10 ms."""

    def __init__(self) -> None:
        super().__init__(name="allocated memory", daemon=True)
        self._lock = threading.Lock()
        self._base = 0
        self._peak = 0

    def run(self) -> None:
        """Look until the process ends."""
        while True:
            size = _allocated_bytes()
            with self._lock:
                self._peak = max(self._peak, size)
            time.sleep(_PAUSE_SECONDS)

    def begin(self) -> None:
        """Measure from what is allocated now."""
        with self._lock:
            self._base = _allocated_bytes()
            self._peak = self._base

    def take_peak(self) -> int:
        """Return the largest size since the last call of this method, above that of `begin`."""
        with self._lock:
            size = _allocated_bytes()
            peak = max(self._peak, size)
            self._peak = size
            return max(peak - self._base, 0)


_watch: _Watch | None = None


def watch_allocations() -> None:
    """Watch what this process allocates from now on, in a thread; `take_allocated_peak` tells.

    What is allocated already does not count from now on. Does nothing without glibc 2.33.
    """
    global _watch
    if _mallinfo2 is None:
        return
    if _watch is None:
        _watch = _Watch()
        _watch.start()
    _watch.begin()


def take_allocated_peak() -> int | None:
    """Return the peak of allocated bytes since the previous call, as sampled every 10 ms.

    None if nothing is watched.
    """
    if _watch is None:
        return None
    return _watch.take_peak()
