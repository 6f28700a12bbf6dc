"""The memory peak of each operation, although several lanes of a rank share one counter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class PeakMemory:
    """Peak of one operation in bytes; complete when the operation has ended. None: not known."""

    bytes: int | None = None


class PeakMemories:
    """Peaks of all operations that run now."""

    def __init__(self, take_peak: Callable[[], int | None]) -> None:
        """take_peak: returns the peak since it was called last, if it is known, and starts anew."""
        self._take_peak = take_peak
        self._running: list[PeakMemory] = []
        self._lock = threading.Lock()

    @contextmanager
    def measure(self) -> Iterator[PeakMemory]:
        """Measure an operation. Each peak counts for all operations that run at that time."""
        own = PeakMemory()
        with self._lock:
            self._count()  # what was before is not the new operation's
            self._running.append(own)
        try:
            yield own
        finally:
            with self._lock:
                self._count()
                self._running.remove(own)

    def _count(self) -> None:
        peak = self._take_peak()
        if peak is None:
            return
        for each in self._running:
            each.bytes = max(each.bytes or 0, peak)
