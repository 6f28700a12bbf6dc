"""The samples of one `score` call: waiting, in a worker, done or failed. Sample numbers only.

Samples are handed out in ascending order, large chunks first, single samples at the end, so that
workers end together. In strict mode a failure makes every later sample pointless; the earlier
ones still run, so that the same sample is blamed however fast each worker is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

_MAX_CHUNK = 64


class Work:
    """Bookkeeping of num_samples samples over num_workers workers."""

    def __init__(self, num_samples: int, num_workers: int, *, strict: bool) -> None:
        self.scores: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, str] = {}
        """Sample number -> what went wrong, with the traceback if there is one."""
        self._waiting = deque(range(num_samples))
        self._num_samples, self._num_workers, self._strict = num_samples, num_workers, strict

    @property
    def finished(self) -> bool:
        """Whether nothing that matters is left to run."""
        if self._strict and self.failures:
            return all(number in self.scores for number in range(min(self.failures)))
        return len(self.scores) + len(self.failures) == self._num_samples

    def next_chunk(self) -> list[int]:
        """Sample numbers for an idle worker; empty if none is waiting."""
        size = min(_MAX_CHUNK, -(-len(self._waiting) // (2 * self._num_workers)))
        return [self._waiting.popleft() for _ in range(size)]

    def fail(self, number: int, cause: str) -> None:
        """Record a failed sample; in strict mode later ones no longer wait."""
        self.failures[number] = cause
        self._forget_pointless()

    def give_back(self, numbers: Sequence[int]) -> None:
        """Samples of a worker that is gone wait again, before all others."""
        self._waiting.extendleft(reversed(numbers))
        self._forget_pointless()

    def _forget_pointless(self) -> None:
        if self._strict and self.failures:
            first = min(self.failures)
            self._waiting = deque(number for number in self._waiting if number < first)
