"""Map functions on several ranks without processes: each rank is a thread that waits for sums."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import is_ragged, lengths_of, ragged

SECONDS = 600.0
"""Only ends what hangs."""


def take(batch: TensorDict, rows: list[int]) -> TensorDict:
    """Some rows of a batch of ragged and dense columns."""

    def of(column: Tensor) -> Tensor:
        if not is_ragged(column):
            return column[rows]
        lengths = lengths_of(column)
        pieces = column.values().split(lengths.tolist())
        chosen = [pieces[row] for row in rows]
        values = torch.cat(chosen) if chosen else column.values()[:0]
        return ragged(values, lengths[rows])

    return TensorDict({name: of(batch[name]) for name in batch.keys()}, batch_size=[len(rows)])


def run_ranks(run: Callable[[int, Callable[[Tensor], Tensor]], Any], num_ranks: int) -> list[Any]:
    """run(rank, reduce) of each rank, in a thread of its own; reduce waits for all ranks.

    A rank that raises ends the others' waits, and its error is raised here.
    """
    meeting = threading.Barrier(num_ranks)
    parts: list[Tensor | None] = [None] * num_ranks

    def meet(rank: int, x: Tensor | None) -> list[Tensor | None]:
        """x of every rank; None: of a rank that has no more sums."""
        parts[rank] = x
        meeting.wait(SECONDS)
        everyone = list(parts)
        meeting.wait(SECONDS)  # all have read them
        return everyone

    def rank_main(rank: int) -> Any:
        def reduce(x: Tensor) -> Tensor:
            everyone = meet(rank, x)
            present = [part for part in everyone if part is not None]
            assert len(present) == num_ranks, "ranks call reduce equally often"
            return torch.stack(present).sum(0)

        try:
            answer = run(rank, reduce)
            everyone = meet(rank, None)
            assert everyone == [None] * num_ranks, "ranks call reduce equally often"
        except threading.BrokenBarrierError:
            return None  # another rank raises, or never comes
        except BaseException:
            meeting.abort()
            raise
        return answer

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(num_ranks)]
    answers = [future.result() for future in futures]
    assert not meeting.broken, "a rank waited too long for the others"
    return answers
