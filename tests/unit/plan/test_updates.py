"""How updates cut rows: plans are proved, and a cut that is wrong in one place is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spmdflow.plan.record import Trace
from tests.proofs.batches import check_batches
from tests.unit.planned import (
    SMALL_GROUPS,
    Commands,
    changed,
    find,
    texts,
    traced,
)


def test_update_that_leaves_out_or_repeats_a_row_is_found(layered: Trace) -> None:
    update = find(layered, "critic.update_critic")

    def leave_out(commands: Commands) -> None:
        for plain in commands.values():
            plain["mini"][0][0] = plain["mini"][0][0][1:]

    def repeat(commands: Commands) -> None:
        for plain in commands.values():
            index = plain["mini"][0][0]
            plain["mini"][0][0] = np.concatenate([index, index[:1]])

    assert "expected 2 (update.num_epochs) each" in texts(
        check_batches(changed(layered, update, leave_out))
    )
    assert "got mini-batch 1 of" in texts(check_batches(changed(layered, update, repeat)))


@pytest.mark.parametrize("name", ["layered", "grouped"])
def test_mini_batches_of_half_the_size_are_found(name: str, request: Any) -> None:
    trace = request.getfixturevalue(name)
    update = find(trace, "actor.update_actor")

    def halve(commands: Commands) -> None:
        for plain in commands.values():
            halves = [
                [half, forwards]
                for index, forwards in plain["mini"]
                for half in (index[: len(index) // 2], index[len(index) // 2 :])
            ]
            plain["mini"] = halves

    found = texts(check_batches(changed(trace, update, halve)))

    assert "expected 6 (update.mini_batch_size) in each but the last of an epoch" in found


def test_mini_batches_of_double_the_size_are_found(layered: Trace) -> None:
    update = find(layered, "critic.update_critic")

    def join(commands: Commands) -> None:
        for plain in commands.values():
            (a, forwards), (b, _), *others = plain["mini"]
            plain["mini"] = [[np.concatenate([a, b]), forwards], *others]

    found = texts(check_batches(changed(layered, update, join)))

    assert "got mini-batch 1 of 12 rows, 0 of them twice, expected at most 6" in found


def test_row_that_no_epoch_uses_and_samples_of_a_prompt_apart_are_found(grouped: Trace) -> None:
    update = find(grouped, "actor.update_actor")

    def leave_out(commands: Commands) -> None:
        commands[0]["mini"][0][0] = commands[0]["mini"][0][0][1:]

    def exchange(commands: Commands) -> None:
        one = commands[0]["mini"][0][0]
        other = commands[0]["mini"][1][0]
        commands[0]["mini"][0][0] = np.concatenate([other[:1], one[1:]])
        commands[0]["mini"][1][0] = np.concatenate([one[:1], other[1:]])

    assert "got rows used [0, 1] times, expected 1" in texts(
        check_batches(changed(grouped, update, leave_out))
    )
    assert "got samples of one prompt in mini-batch 2 and before in its epoch" in texts(
        check_batches(changed(grouped, update, exchange))
    )


@pytest.mark.parametrize(
    ("prompts", "size", "sizes"),
    [(12, 6, [6, 6]), (12, 5, [5, 5, 2]), (12, 20, [12]), (3, 4, [3])],
)
def test_uneven_ends_of_epochs_are_right(prompts: int, size: int, sizes: list[int]) -> None:
    words = [f"data.prompts_per_step={prompts}", "eval_every=0", "actor.update.num_epochs=2"]
    trace = traced("ppo", 2, *words, f"actor.update.mini_batch_size={size}")
    plain = find(trace, "actor.update_actor").commands

    got = [sum(len(p["mini"][n][0]) for p in plain.values()) for n in range(2 * len(sizes))]

    assert check_batches(trace) == []
    assert got == sizes * 2


def test_groups_that_do_not_fill_a_mini_batch_are_right() -> None:
    words = [*SMALL_GROUPS, "data.samples_per_prompt=4", "data.prompts_per_step=5"]
    trace = traced("grpo", 2, *words)
    plain = find(trace, "actor.update_actor").commands

    got = [sum(len(p["mini"][n][0]) for p in plain.values()) for n in range(5)]

    assert check_batches(trace) == []
    assert got == [4] * 5


def test_rank_that_counts_other_forwards_is_found(layered: Trace) -> None:
    update = find(layered, "actor.update_actor")

    def more(commands: Commands) -> None:
        commands[2]["mini"][1][1] += 1

    found = texts(check_batches(changed(layered, update, more)))

    assert "different numbers of forwards by rank" in found
