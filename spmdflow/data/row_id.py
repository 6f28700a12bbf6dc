"""Row ids: who a row is, in every column and on every rank. Integers only."""

from __future__ import annotations

import numpy as np

Ids = np.ndarray
"""Row ids, int64, in order."""


class RowIds:
    """Numbers rows as they are drawn; `next_id` is part of a checkpoint."""

    def __init__(self) -> None:
        self.next_id = 0
        """The first id that was not given out yet."""

    def take(self, count: int) -> Ids:
        """(count,) int64: ids never used before in this run."""
        self.next_id += count
        return np.arange(self.next_id - count, self.next_id, dtype=np.int64)

    def take_groups(self, count: int, size: int) -> tuple[Ids, Ids]:
        """Ids and parents (count * size,) of `count` groups of `size` new rows."""
        groups = self.take(count)
        return self.take(count * size), np.repeat(groups, size)
