"""How the C library's allocator treats freed memory. Imports nothing of ours and no torch."""

from __future__ import annotations

import ctypes

# of malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Make glibc keep up to 2 GiB of freed memory in the process.

    By default glibc returns it to the system. Every forward frees its activations, and getting
    their pages again takes a fifth of a small model's time on a CPU. Does nothing without glibc.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            adjust(setting, (1 << 31) - 1)
