"""When the workers of a rank are asked to free memory for another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spmdflow.worker_api.register import register
from tests.unit.toy_flow import Toy, ToyConfig, draw, rank_of_one


class Cached(Toy):
    """Has memory between its calls that it can free, and notes when it is asked to."""

    def __init__(self, *arguments: Any) -> None:
        """Allocates the memory."""
        super().__init__(*arguments)
        self.cache: torch.Tensor | None = torch.ones(8)
        self.asked: list[bool] = []

    def make_room(self, *, trains: bool) -> None:
        """Free the memory."""
        self.cache = None
        self.asked.append(trains)

    @register(transfer_mode="ONE_TO_ALL")
    def read_asked(self) -> list[bool]:
        """For which calls memory was freed, and forget them."""
        asked = self.asked
        self.asked = []
        return asked


class Large(Toy):
    """Needs the memory while it is built."""

    def __init__(self, *arguments: Any) -> None:
        """Look whether the first worker has freed its memory."""
        super().__init__(*arguments)
        (neighbour,) = self.context.workers.values()
        assert isinstance(neighbour, Cached) and neighbour.cache is None


def test_workers_free_memory_before_another_is_built(tmp_path: Path) -> None:
    with rank_of_one(tmp_path) as rank:
        cached = rank.flow.spawn(Cached, ToyConfig(), name="cached")

        rank.flow.spawn(Large, ToyConfig(), name="large")

        assert cached.read_asked().values_by_rank() == [[True]]


def test_workers_free_memory_for_calls_and_files_of_others_but_not_for_their_own(
    tmp_path: Path,
) -> None:
    with rank_of_one(tmp_path) as rank:
        cached = rank.flow.spawn(Cached, ToyConfig(), name="cached")
        other = rank.flow.spawn(Toy, ToyConfig(), name="other")
        prompts = rank.flow.prompts(rank.config.data)
        cached.read_asked().values_by_rank()

        rows = draw(prompts, cached)
        by_own_call = cached.read_asked().values_by_rank()
        other.add(rows)
        by_inference = cached.read_asked().values_by_rank()
        other.update(rows)
        by_training = cached.read_asked().values_by_rank()
        for _ in rank.flow.steps(1):
            rank.flow.save(every=1)
        by_saving = cached.read_asked().values_by_rank()

    assert (by_own_call, by_inference, by_training) == ([[]], [[False]], [[True]])
    assert by_saving == [[False]]
