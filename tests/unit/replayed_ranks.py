"""Map functions on several ranks without processes: a reduce is a sum known at the replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import is_ragged, lengths_of, ragged


def take(batch: TensorDict, rows: list[int]) -> TensorDict:
    """Some rows of a batch of ragged and dense columns."""

    def of(column: Tensor) -> Tensor:
        if not is_ragged(column):
            return column[rows]
        pieces = [column.values().split(lengths_of(column).tolist())[row] for row in rows]
        values = torch.cat(pieces) if pieces else column.values()[:0]
        return ragged(values, lengths_of(column)[rows])

    return TensorDict({name: of(batch[name]) for name in batch.keys()}, batch_size=[len(rows)])


def run_ranks(run: Callable[[int, Callable[[Tensor], Tensor]], Any], num_ranks: int) -> list[Any]:
    """run(rank, reduce) of each rank, one after another, replayed with ever more sums known."""
    sums: list[Tensor] = []
    while True:
        calls: list[list[Tensor]] = []
        answers = []
        for rank in range(num_ranks):
            mine: list[Tensor] = []

            def reduce(x: Tensor, mine: list[Tensor] = mine) -> Tensor:
                mine.append(x)
                return sums[len(mine) - 1] if len(mine) <= len(sums) else x

            answers.append(run(rank, reduce))
            calls.append(mine)
        assert len({len(mine) for mine in calls}) == 1, "ranks call reduce equally often"
        if len(sums) == len(calls[0]):
            return answers
        sums.append(torch.stack([mine[len(sums)] for mine in calls]).sum(0))
