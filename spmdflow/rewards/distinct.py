"""How varied responses are: distinct-n (Li et al. 2016, section 5.1). Pure, on the host.

A policy that repeats itself, or that has collapsed to a few phrases, has few different n-grams.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from spmdflow.data.ragged import lengths_of


def distinct_share(responses: Tensor, n: int = 2) -> tuple[float, int]:
    """Return (sum over rows of the share of different n-grams, number of rows that have one).

    responses: ragged token ids. The share of a row is the number of its different n-grams divided
    by the number of all of them; 1 if none repeats. Rows with fewer than n tokens do not count.
    """
    lengths = lengths_of(responses).numpy()
    tokens = responses.values().numpy()
    row_of_token = np.repeat(np.arange(len(lengths)), lengths)
    count = max(len(tokens) - n + 1, 0)
    ends = row_of_token[n - 1 :][:count]
    inside = ends == row_of_token[:count]
    row = row_of_token[:count][inside]
    if not len(row):
        return 0.0, 0
    columns = [tokens[start : start + count][inside] for start in range(n)]
    order = np.lexsort((*columns, row))
    is_new = np.zeros(len(row), dtype=bool)
    is_new[0] = True
    for column in (row, *columns):
        ordered = column[order]
        is_new[1:] |= ordered[1:] != ordered[:-1]
    different = np.bincount(row[order][is_new], minlength=len(lengths))
    every = np.bincount(row, minlength=len(lengths))
    counted = every > 0
    return float((different[counted] / every[counted]).sum()), int(counted.sum())
