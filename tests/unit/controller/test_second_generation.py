"""A second generation of the same rows in one step draws other noise, reproducibly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from spmdflow.config.schema import ActorConfig, EngineConfig, ModelConfig, RolloutConfig
from spmdflow.controller.batch import Batch, concatenate
from spmdflow.controller.draw_count import DrawCounts
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.data.row_id import seed_of
from spmdflow.errors import ProtocolError
from spmdflow.models.generator import row_seeds
from spmdflow.models.policy import ActorWorker
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.register import map_function
from tests.unit.toy_flow import TASK, Rank, rank_of_one

ROWS = 1024
NEARLY_UNIFORM = 1e4
"""A temperature: noise alone decides, so that equal noise shows as equal tokens."""


@map_function(reads=("prompts", "responses"), writes=("prompts",))
def next_turn(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """The prompts of a second turn: prompt, response and the beginning of the prompt again."""
    turns = zip(rows_of(batch["prompts"]), rows_of(batch["responses"]), strict=True)
    rows = [torch.cat([prompt, response, prompt[:3]]) for prompt, response in turns]
    return TensorDict({"prompts": ragged_from_rows(rows)}, batch_size=batch.batch_size)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of_one(tmp_path / "run", prompts_per_step=ROWS) as made:
        yield made


def spawned(rank: Rank) -> tuple[Any, Batch]:
    """An actor that draws nearly uniformly, and the rows of step 1."""
    rollout = RolloutConfig(max_new_tokens=4, temperature=NEARLY_UNIFORM, max_batch_size=ROWS)
    model = ModelConfig(path=str(TASK / "model"))
    cfg = ActorConfig(model=model, engine=EngineConfig(), rollout=rollout)
    actor = rank.flow.spawn(ActorWorker, cfg, pool=rank.flow.pool("all"))
    prompts = rank.flow.prompts(rank.config.data)
    next(rank.flow.steps(1))
    return actor, next(prompts)


def responses(batch: Batch) -> list[list[int]]:
    values = batch.fetch("responses")["responses"]
    assert isinstance(values, torch.Tensor)
    return [row.tolist() for row in rows_of(values)]


def share_equal(one: list[Any], other: list[Any]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def test_second_generation_of_the_same_rows_repeats_no_more_than_chance(rank: Rank) -> None:
    actor, drawn = spawned(rank)

    first = responses(actor.generate_sequences(drawn))
    second = responses(actor.generate_sequences(drawn))

    neighbours = share_equal(first, first[1:] + first[:1])
    assert share_equal(first, second) < neighbours + 0.05  # 1.0 with one noise for both


def test_first_tokens_of_a_second_turn_are_independent_of_the_first_turn(rank: Rank) -> None:
    actor, drawn = spawned(rank)

    turn = actor.generate_sequences(drawn)
    again = actor.generate_sequences(turn.map(next_turn))

    one, two = ([row[0] for row in responses(batch)] for batch in (turn, again))
    chance = 1 / len(set(one))
    assert abs(share_equal(one, two) - chance) < 4 * (chance / ROWS) ** 0.5  # 0.98 before


def test_first_generation_is_the_same_whatever_greedy_calls_came_before(tmp_path: Path) -> None:
    found = []
    for greedy_calls in range(3):
        with rank_of_one(tmp_path / str(greedy_calls), prompts_per_step=ROWS) as rank:
            actor, drawn = spawned(rank)
            for _ in range(greedy_calls):
                actor.generate_sequences(drawn, greedy=True)
            found.append(responses(actor.generate_sequences(drawn[:3])))

    assert found[0] == found[1] == found[2]


def test_rows_in_one_call_or_in_two_draw_the_same(rank: Rank) -> None:
    actor, drawn = spawned(rank)
    few = drawn[:64]
    draws = [responses(actor.generate_sequences(few)) for _ in range(2)]
    rank.flow.caller._draws = DrawCounts()

    halves = [
        concatenate([actor.generate_sequences(few[:32]), actor.generate_sequences(few[32:])])
        for _ in range(2)
    ]

    assert [responses(batch) for batch in halves] == draws


def test_draws_are_counted_by_row_phase_and_step() -> None:
    draws = DrawCounts()
    ids = np.array([7, 3, 5])

    assert draws.take(1, "train", ids).tolist() == [0, 0, 0]
    assert draws.take(1, "train", ids[:2]).tolist() == [1, 1]
    assert draws.take(1, "train", np.array([5, 9, 3])).tolist() == [1, 0, 2]
    assert draws.take(1, "train", ids, greedy=True).tolist() == [2, 3, 2]
    assert draws.take(1, "train", ids).tolist() == [2, 3, 2]
    assert draws.take(1, "eval", ids).tolist() == [0, 0, 0]
    assert draws.take(2, "train", ids).tolist() == [0, 0, 0]


def test_seed_of_a_first_generation_has_no_number_more() -> None:
    ids = torch.tensor([4, 1 << 62])
    calls = [Command(1, 3, ids, generation=torch.full_like(ids, n)) for n in (0, 2)]
    context: Any = type("Context", (), {"seed": 11, "name": "actor"})

    first, third = (row_seeds(context, call) for call in calls)

    assert first == [seed_of(11, "generate", 3, 4), seed_of(11, "generate", 0, 1 << 62)]
    assert third == [seed_of(11, "generate", 3, 4, 2), seed_of(11, "generate", 0, 1 << 62, 2)]


def test_generating_in_a_method_that_is_not_marked_as_drawing_is_refused() -> None:
    context: Any = type("Context", (), {"seed": 11, "name": "actor"})

    with pytest.raises(ProtocolError, match=r"actor: got a call that generates .*draws=True"):
        row_seeds(context, Command(1, 3, torch.tensor([4])))
