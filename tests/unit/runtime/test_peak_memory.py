"""The peak of each operation, although a peak can be asked for only once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spmdflow.parallel.allocated import pause_after
from spmdflow.runtime.peak_memory import PeakMemories

ROOT = Path(__file__).parents[3]


class Counter:
    """Stands for an allocator: bytes in use, and their peak since it was last asked."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0

    def use(self, size: int) -> None:
        self.used = size
        self.peak = max(self.peak, size)

    def take_peak(self) -> int:
        peak = self.peak
        self.peak = self.used
        return peak


def test_peak_of_an_operation_is_not_lost_to_a_shorter_one_beside_it() -> None:
    counter = Counter()
    peaks = PeakMemories(counter.take_peak)

    with peaks.measure() as long:
        counter.use(700)
        counter.use(100)
        with peaks.measure() as short:
            counter.use(300)
        counter.use(200)

    assert (long.bytes, short.bytes) == (700, 300)


def test_what_an_earlier_operation_used_does_not_count() -> None:
    counter = Counter()
    peaks = PeakMemories(counter.take_peak)
    counter.use(900)
    counter.use(50)

    with peaks.measure() as peak:
        counter.use(60)

    assert peak.bytes == 60


def test_peak_of_allocations_counts_what_was_freed_and_not_what_was_there_before() -> None:
    program = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
from spmdflow.parallel.allocated import AllocatedPeak
before = libc.malloc(ctypes.c_size_t(64 << 20))
peak = AllocatedPeak()
peak.take()
block = libc.malloc(ctypes.c_size_t(32 << 20))
seen = peak.take()
libc.free(block)
after = peak.take(), peak.take()
peak.end()
assert peak.take() is None
print(seen, *after)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600
    )

    assert done.returncode == 0, done.stderr
    seen, held_before, now = map(int, done.stdout.split())
    assert 32 << 20 <= seen < 33 << 20
    assert held_before >= 32 << 20 and now < 1 << 20


def test_samples_of_memory_take_two_percent_of_a_processor_at_most() -> None:
    assert pause_after(0.0) == pause_after(1e-4) == 0.01
    assert pause_after(3e-3) == 0.15
