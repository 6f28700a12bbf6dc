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
_SHARE = 0.02
"""Of a processor, at most, that the samples take."""


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
    """Return the bytes of all allocations that were not freed.

    The library walks through all free pieces for it, while other threads cannot allocate: 3 ms in a
    process with a model of 135 million parameters.
    """
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


def pause_after(seconds: float) -> float:
    """Return how long to wait after a look that took `seconds`."""
    return max(_PAUSE_SECONDS, seconds / _SHARE)


class AllocatedPeak:
    """The peak of what this process has allocated since this object was made, until `end`.

    A thread looks at it every 10 ms, or less often, so that looking takes 2 % of a processor at
    most; a peak that lasts a shorter time may be missed. Without glibc 2.33 nothing is measured.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if _mallinfo2 is None:
            return
        self._base = _allocated_bytes()
        self._peak = self._base
        self._thread = threading.Thread(target=self._look, name="allocated memory", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        pause = _PAUSE_SECONDS
        while not self._ended.wait(pause):
            begin = time.perf_counter()
            size = _allocated_bytes()
            pause = pause_after(time.perf_counter() - begin)
            with self._lock:
                self._peak = max(self._peak, size)

    def take(self) -> int | None:
        """Return the largest number of bytes since the last call, above that of the start.

        None if nothing is measured.
        """
        if self._thread is None:
            return None
        with self._lock:
            size = _allocated_bytes()
            peak = max(self._peak, size)
            self._peak = size
            return max(peak - self._base, 0)

    def end(self) -> None:
        """End the thread. A second call does nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
