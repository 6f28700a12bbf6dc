"""The order of prompts: permutations, cursors, continuation, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.datasets.scan import ScanReport
from spmdflow.datasets.stream import PromptOrder, eval_rows
from spmdflow.errors import CheckpointError, DataError


def report_of(rows: list[int], *, fingerprint: str = "f") -> ScanReport:
    """A report of good rows without a file."""
    return ScanReport(
        path="p.jsonl",
        num_bytes=1,
        num_rows=max(rows) + 1,
        rows=np.asarray(rows),
        token_lengths=np.full(len(rows), 3),
        num_too_long=0,
        longest_tokens=3,
        bad_rows=[],
        fingerprint=fingerprint,
    )


ROWS = st.sets(st.integers(0, 200), min_size=1, max_size=40).map(sorted)


@given(ROWS, st.integers(1, 40), st.integers(0, 2**40), st.booleans())
def test_every_epoch_is_a_permutation_of_the_good_rows(rows, per_step, seed, shuffle):
    per_step = min(per_step, len(rows))
    stream = PromptOrder(report_of(rows), prompts_per_step=per_step, seed=seed, shuffle=shuffle)

    drawn = [number for _ in range(3 * len(rows)) for number in stream.next_rows()]

    for start in range(0, len(drawn) - len(rows) + 1, len(rows)):
        assert sorted(drawn[start : start + len(rows)]) == rows
    assert stream.epoch == len(drawn) // len(rows)


@given(ROWS, st.integers(1, 40), st.integers(0, 30), st.integers(0, 1000))
def test_stream_resumed_at_any_point_continues_identically(rows, per_step, steps, seed):
    per_step = min(per_step, len(rows))
    whole = PromptOrder(report_of(rows), prompts_per_step=per_step, seed=seed)
    for _ in range(steps):
        whole.next_rows()

    resumed = PromptOrder(report_of(rows), prompts_per_step=per_step, seed=seed)
    resumed.next_rows()
    resumed.load_state_dict(whole.state_dict())

    assert [whole.next_rows() for _ in range(20)] == [resumed.next_rows() for _ in range(20)]
    assert whole.state_dict() == resumed.state_dict()


def test_order_depends_on_seed_and_epoch_and_on_nothing_else():
    rows = list(range(30))
    streams = [PromptOrder(report_of(rows), prompts_per_step=30, seed=s) for s in (1, 1, 2)]

    first, again, other = ([s.next_rows(), s.next_rows()] for s in streams)

    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_stream_without_shuffle_keeps_the_order_of_the_file():
    stream = PromptOrder(report_of([1, 4, 9]), prompts_per_step=2, seed=0, shuffle=False)

    assert [stream.next_rows() for _ in range(3)] == [[1, 4], [9, 1], [4, 9]]


def test_first_order_of_seed_0_is_the_known_one():
    """A run resumed on a newer build must go on in the same order."""
    stream = PromptOrder(report_of(list(range(8))), prompts_per_step=8, seed=0)

    assert stream.next_rows() == [2, 4, 6, 1, 5, 0, 7, 3]


def test_fewer_good_rows_than_a_step_takes_is_refused_with_both_numbers():
    report = replace(report_of([0, 1, 2]), num_rows=9)

    with pytest.raises(DataError) as caught:
        PromptOrder(report, prompts_per_step=4, seed=0)

    assert str(caught.value) == (
        "p.jsonl: got 3 usable prompts of 9 rows, expected at least the 4 of one step; "
        "lower data.prompts_per_step, or add rows"
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            PromptOrder(report_of([0, 1], fingerprint="g"), prompts_per_step=1, seed=0),
            "p.jsonl: got a saved position of prompts with fingerprint 'g', expected 'f'; resume "
            "with the file and the data settings of the first run, or start a new run directory",
        ),
        (
            PromptOrder(report_of([0, 1, 2]), prompts_per_step=1, seed=0),
            "p.jsonl: got a saved position of prompts with num_rows 3, expected 2; resume "
            "with the file and the data settings of the first run, or start a new run directory",
        ),
        (
            PromptOrder(report_of([0, 1]), prompts_per_step=1, seed=7),
            "p.jsonl: got a saved position of prompts with seed 7, expected 0; resume "
            "with the file and the data settings of the first run, or start a new run directory",
        ),
    ],
)
def test_state_of_another_file_size_or_seed_is_refused(other, message):
    stream = PromptOrder(report_of([0, 1]), prompts_per_step=1, seed=0)

    with pytest.raises(CheckpointError) as caught:
        stream.load_state_dict(other.state_dict())

    assert str(caught.value) == message


def test_state_may_be_resumed_with_another_number_of_prompts_per_step():
    rows = list(range(10))
    one = PromptOrder(report_of(rows), prompts_per_step=3, seed=0)
    drawn = one.next_rows()
    two = PromptOrder(report_of(rows), prompts_per_step=7, seed=0)

    two.load_state_dict(one.state_dict())

    assert sorted(drawn + two.next_rows()) == rows


def test_evaluation_takes_the_first_rows_or_all_and_refuses_more_than_there_are():
    report = report_of([2, 3, 5, 7])

    assert eval_rows(report, 2) == [2, 3]
    assert eval_rows(report, None) == [2, 3, 5, 7]
    with pytest.raises(DataError) as caught:
        eval_rows(report, 5)
    assert str(caught.value) == (
        "p.jsonl: got 4 usable prompts, expected at least 5 (data.eval_prompts); "
        "lower it, or set it to null for all prompts"
    )


def test_second_stream_has_an_order_of_its_own_but_an_old_position_keeps_its() -> None:
    rows = list(range(30))
    first = PromptOrder(report_of(rows), prompts_per_step=30, seed=0)
    second = PromptOrder(report_of(rows), prompts_per_step=30, seed=0, name="pretrain")
    resumed = PromptOrder(report_of(rows), prompts_per_step=30, seed=0, name="pretrain")
    old = first.state_dict()
    del old["has_own_orders"]  # as versions saved it in which all streams were permuted alike
    resumed.load_state_dict(old)

    orders = [stream.next_rows() for stream in (first, second, resumed)]

    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert orders[2] == orders[0]
