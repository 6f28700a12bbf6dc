"""Row ids: who a row is, in every column and on every rank. Integers only.

Rows of training are numbered as they are drawn. A held-out row's id is made of its number in the
file and its sample's number: an evaluation takes no id from training, whose random streams derive
from row ids, and draws the same noise for a row whenever and beside whatever it is evaluated.
"""

from __future__ import annotations

import numpy as np

from spmdflow.errors import ConfigError

Ids = np.ndarray
"""Row ids, int64, in order."""

_FIRST_HELD_OUT = 1 << 62
_MOST_SAMPLES = 1 << 20


class RowIds:
    """Numbers rows of training; `next_id` is part of a checkpoint."""

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


def held_out_ids(rows: np.ndarray, num_samples: int) -> tuple[Ids, Ids]:
    """Ids and parents (P * num_samples,) of P rows of a held-out file, num_samples of each.

    rows (P,) int64: numbers in the file. The first samples of a row have the same ids however
    many there are. ConfigError beyond 2**20 samples.
    """
    if num_samples > _MOST_SAMPLES:
        raise ConfigError(
            f"data.eval_prompts: got {num_samples} samples for each prompt, expected at most "
            f"{_MOST_SAMPLES}; ask for less"
        )
    first = _FIRST_HELD_OUT + rows.astype(np.int64) * _MOST_SAMPLES
    ids = first[:, None] + np.arange(num_samples, dtype=np.int64)
    return ids.reshape(-1), np.repeat(first, num_samples)


def is_held_out(row_id: int) -> bool:
    """Whether the id is one of `held_out_ids`."""
    return row_id >= _FIRST_HELD_OUT
