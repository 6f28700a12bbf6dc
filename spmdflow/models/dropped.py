"""Rows whose reward function failed: counted over the ranks of a call, of which few may fail."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spmdflow.transfer.worker import WorkerContext


class Dropped(NamedTuple):
    """Failed rows of one call, over all ranks."""

    num_failed: int
    num_rows: int
    first_rank: int
    """Of the ranks that count together, the first with a failed row; -1: there is none."""

    @property
    def percent(self) -> float:
        """Share of the call's rows."""
        return 100 * self.num_failed / max(self.num_rows, 1)

    def excess(self, key: str, max_percent: float) -> str:
        """What is wrong if the share is above max_percent; key: of the setting."""
        return (
            f"{key}: got {self.num_failed} failed rows among the {self.num_rows} of one call "
            f"({self.percent:.3g} %), expected at most {max_percent:g} %; fix the function, or set "
            f"a larger share, such as {key}='drop {-(-self.percent // 5) * 5:g}%'"
        )


def count_dropped(valid: Tensor, context: WorkerContext) -> Dropped:
    """Of this rank's rows (B,) and those of its data-parallel peers, which all call it."""
    peers = context.layout.axis_group(context.rank, "dp")
    table = torch.zeros(2, len(peers))
    table[:, peers.index(context.rank)] = torch.tensor([float((~valid).sum()), len(valid)])
    failed, rows = context.groups.reducer(peers)(table).long().tolist()
    first = next((rank for rank, count in zip(peers, failed, strict=True) if count), -1)
    return Dropped(sum(failed), sum(rows), first)
