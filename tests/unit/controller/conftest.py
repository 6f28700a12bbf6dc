"""A flow of one rank with a toy model, its prompts, and a batch that went through both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdflow.controller.batch import Batch
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.prompts import PromptStream
from tests.unit.toy_flow import Rank, Toy, ToyConfig, draw, rank_of_one


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of_one(tmp_path) as rank:
        yield rank


@pytest.fixture
def toy(rank: Rank) -> WorkerGroup:
    return rank.flow.spawn(Toy, ToyConfig())


@pytest.fixture
def prompts(rank: Rank) -> PromptStream:
    return rank.flow.prompts(rank.config.data)


@pytest.fixture
def batch(prompts: PromptStream, toy: WorkerGroup) -> Batch:
    """Six rows with the columns of the data and of Toy.make; row ids 6 to 11."""
    return draw(prompts, toy)
