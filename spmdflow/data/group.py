"""`RowGroups`: which rows belong together, such as the samples of one prompt, over all ranks.

The rows of a group may lie on different ranks, so sums over a group go through `reduce`. Knows
no column names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RowGroups:
    """Groups of the rows of a batch, as one rank that has some of the rows sees them."""

    index: Tensor
    """(B,) int64: the group of each row here; groups are numbered alike on every rank."""
    count: int
    """Groups of the whole batch."""
    reduce: Callable[[Tensor], Tensor]
    """Sums a tensor over the ranks that share the batch; all of them call it equally often."""
    place: Tensor | None = None
    """(B,) int64: which row of its group each row is, from 0; other ranks have the others."""
    largest: int = 0
    """Rows of the largest group."""

    def only(self, valid: Tensor) -> RowGroups:
        """The groups of the rows where valid (B,) is True; the others are one more group."""
        index = torch.where(valid, self.index, self.count)
        return replace(self, index=index, count=self.count + 1)

    def sums(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...): for each row the float64 sum of x over its whole group."""
        index = self.index.to(x.device)
        totals = x.new_zeros((self.count, *x.shape[1:]), dtype=torch.float64)
        totals.index_add_(0, index, x.double())
        return self.reduce(totals)[index]

    def sizes(self) -> Tensor:
        """(B,) float64: rows of each row's group."""
        return self.sums(torch.ones_like(self.index, dtype=torch.float64))

    def members(self, x: Tensor) -> Tensor:
        """(B,) -> (B, largest) float64: x of every row of each row's group, then nan."""
        assert self.place is not None, "made without places"
        index, place = self.index.to(x.device), self.place.to(x.device)
        table = x.new_zeros((2, self.count, self.largest), dtype=torch.float64)
        table[0, index, place] = x.double()
        table[1, index, place] = 1.0
        values, there = self.reduce(table)
        return torch.where(there > 0, values, torch.nan)[index]

    def means(self, x: Tensor) -> Tensor:
        """(B,) -> (B,) float64: for each row the mean of x over its whole group."""
        return self.sums(x) / self.sizes()


def places_in_groups(groups: np.ndarray) -> tuple[np.ndarray, int]:
    """(B,) int64 groups from 0 -> which row of its group each row is (B,), and the largest size."""
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups) if len(groups) else np.zeros(0, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    places = np.empty(len(groups), dtype=np.int64)
    places[order] = np.arange(len(groups)) - starts[groups[order]]
    return places, int(sizes.max(initial=0))
