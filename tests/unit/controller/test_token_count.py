"""Tokens of a step: hand-counted rows of generations and updates."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmdflow.controller.row_use import UseKind
from spmdflow.controller.token_count import CountedRows, count_tokens


def rows(
    number: int,
    kind: UseKind,
    ids: list[int],
    prompts: list[int] | None,
    responses: list[int] | None,
    *,
    lineage: set[int] | None = None,
    valid: list[bool] | None = None,
) -> CountedRows:
    label = "actor.update_actor" if kind is UseKind.TRAIN else "actor.generate_sequences"
    return CountedRows(
        number,
        label,
        kind,
        frozenset({number} if lineage is None else lineage),
        np.array(ids),
        None if prompts is None else np.array(prompts),
        None if responses is None else np.array(responses),
        None if valid is None else np.array(valid),
    )


def count(*uses: CountedRows, ages: Any = (), window: int | None = None) -> dict[str, Any]:
    return count_tokens(uses, ages, windows={"actor": window}, epochs=lambda model: 2)


def totals(rows: int, prompts: int | None, responses: int) -> dict[str, int | None]:
    return {"rows": rows, "prompt_tokens": prompts, "response_tokens": responses}


def test_rows_that_no_update_gets_are_dropped() -> None:
    generated = rows(1, UseKind.GENERATE, [0, 1, 2, 3], [5, 5, 6, 6], [1, 2, 3, 4])
    update = rows(2, UseKind.TRAIN, [2, 3], [6, 6], [3, 4], lineage={1})

    counts = count(generated, update)

    assert counts["trained"] == totals(2, 12, 7)
    assert counts["dropped"] == totals(2, 10, 3)
    assert counts["failed"] == totals(0, 0, 0)
    assert counts["stale"] is None, "there is no queue"
    assert counts["prompt_lengths"] == [[6, 2]]
    assert counts["response_lengths"] == [[3, 1], [4, 1]]


def test_row_of_two_updates_counts_once_and_is_failed_if_one_left_it_out() -> None:
    critic = rows(2, UseKind.TRAIN, [0, 1], [5, 5], [1, 2], lineage={1})
    actor = rows(3, UseKind.TRAIN, [1, 0], [5, 5], [2, 1], lineage={1}, valid=[False, True])

    counts = count(critic, actor)

    assert counts["trained"] == totals(1, 5, 1)
    assert counts["failed"] == totals(1, 5, 2)


def test_second_responses_to_the_same_rows_are_dropped_if_the_update_gets_the_first() -> None:
    sampled = rows(1, UseKind.GENERATE, [0, 1], [5, 5], [3, 4])
    greedy = rows(2, UseKind.GENERATE, [0], [5], [7])
    update = rows(3, UseKind.TRAIN, [0, 1], [5, 5], [3, 4], lineage={1})

    counts = count(sampled, greedy, update)

    assert counts["trained"] == totals(2, 10, 7)
    assert counts["dropped"] == totals(1, 5, 7)


def test_continued_responses_count_with_their_whole_length_once() -> None:
    first = rows(1, UseKind.GENERATE, [0, 1], [5, 5], [2, 2])
    second = rows(2, UseKind.GENERATE, [0, 1], [5, 5], [6, 3], lineage={1, 2})
    update = rows(3, UseKind.TRAIN, [0], [5], [6], lineage={1, 2})

    counts = count(first, second, update)

    assert counts["trained"] == totals(1, 5, 6)
    assert counts["dropped"] == totals(1, 5, 3)
    assert [each["kind"] for each in counts["passes"]] == ["generate", "train"]
    assert counts["passes"][0]["tokens"] == 19


def test_trained_rows_begun_with_older_weights_are_stale() -> None:
    update = rows(2, UseKind.TRAIN, [0, 1, 2], [5, 5, 5], [1, 2, 4], lineage={1})

    assert count(update, ages=[(np.array([0, 1]), 2), (np.array([2]), 0)])["stale"] == totals(
        2, 10, 3
    )
    assert count(update, ages=[(np.array([0, 1, 2]), 0)])["stale"] == totals(0, 0, 0)


def test_pass_of_an_update_has_tokens_outputs_and_attended_pairs() -> None:
    update = rows(2, UseKind.TRAIN, [0, 1], [5, 6], [3, 4], lineage={1})

    (whole,) = count(update)["passes"]
    (cut,) = count(update, window=4)["passes"]

    assert whole == {
        "call": "actor.update_actor",
        "kind": "train",
        "rows": 2,
        "epochs": 2,
        "tokens": 18,
        "head_tokens": 7,
        "attended": 8 * 8 / 2 + 10 * 10 / 2,
    }
    assert cut["attended"] == (4 * 8 - 8) + (4 * 10 - 8)


def test_rows_without_responses_have_outputs_at_all_tokens_and_no_response_tokens() -> None:
    counts = count(rows(2, UseKind.TRAIN, [0, 1], [5, 6], None))

    assert counts["trained"] == totals(2, 11, 0)
    assert counts["response_lengths"] is None
    assert counts["passes"][0]["head_tokens"] == 11


def test_prompts_of_unknown_length_are_null_and_not_zero() -> None:
    counts = count(rows(2, UseKind.TRAIN, [0, 1], None, [5, 6]))

    assert counts["trained"] == totals(2, None, 11)
    assert counts["prompt_lengths"] is None
    assert counts["passes"][0]["tokens"] is None


def test_step_without_an_update_has_trained_nothing() -> None:
    counts = count(rows(1, UseKind.GENERATE, [0], [5], [2]))

    assert counts["trained"] == totals(0, 0, 0)
    assert counts["dropped"] == totals(1, 5, 2)
