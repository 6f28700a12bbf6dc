"""Where rows lie in a memory that holds many, one after the other. Integers only."""

from __future__ import annotations

import numpy as np


def row_runs(held: np.ndarray, ids: np.ndarray) -> np.ndarray | None:
    """(n, 2) int64: place of the first row and number of rows of each run of neighbours.

    held: (h,) int64 ids in the order in which the rows lie; ids: (m,) int64, in the order in
    which they are wanted. None if some are not held.
    """
    if np.array_equal(held, ids):
        return np.array([[0, len(held)]][: len(held)], dtype=np.int64).reshape(-1, 2)
    order = np.argsort(held, kind="stable")
    found = np.searchsorted(held, ids, sorter=order)
    if not len(ids):
        return np.zeros((0, 2), dtype=np.int64)
    if found.max() == len(held):
        return None
    places = order[found]
    if (held[places] != ids).any():
        return None
    firsts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    return np.stack([places[firsts], np.diff(firsts, append=len(places))], axis=1)


def byte_stretches(runs: np.ndarray, lengths: np.ndarray | None, item_bytes: int) -> np.ndarray:
    """(n, 2) int64: offset and bytes of each run of rows.

    lengths: (h,) items of each row that lies there; None: one each.
    """
    if lengths is None:
        return runs * item_bytes
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    first, stop = runs[:, 0], runs.sum(axis=1)
    return np.stack([ends[first], ends[stop] - ends[first]], axis=1) * item_bytes
