"""`RowGroups`: which rows belong together, such as the samples of one prompt, over all ranks.

The rows of a group may lie on different ranks, so sums over a group go through `reduce`. Knows
no column names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

    def sums(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...): for each row the float64 sum of x over its whole group."""
        index = self.index.to(x.device)
        totals = x.new_zeros((self.count, *x.shape[1:]), dtype=torch.float64)
        totals.index_add_(0, index, x.double())
        return self.reduce(totals)[index]

    def sizes(self) -> Tensor:
        """(B,) float64: rows of each row's group."""
        return self.sums(torch.ones_like(self.index, dtype=torch.float64))

    def means(self, x: Tensor) -> Tensor:
        """(B,) -> (B,) float64: for each row the mean of x over its whole group."""
        return self.sums(x) / self.sizes()
