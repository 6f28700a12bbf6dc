"""What a user sees: progress line, sample table, curves as text."""

from __future__ import annotations

import io
import math
import unicodedata

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.controller.sample import choose_positions
from spmdflow.controller.step import is_due
from spmdflow.tracking.progress import (
    FIELDS,
    Sample,
    print_samples,
    printable,
    progress_line,
    shorten_text,
    stage_seconds,
    text_curve,
)

METRICS = {
    "reward/mean": 1.23456,
    "eval/accuracy": 0.612,
    "actor/approx_kl": 0.00123,
    "actor/clip_fraction": 0.081,
    "critic/explained_variance": 0.314,
    "rollout/drift": 2.1e-7,
    "perf/tokens_per_second": 1240.4,
    "time/generate_sequences_seconds": 1.2,
    "time/compute_log_prob_seconds": 0.3,
    "time/compute_reward_seconds": 0.01,
    "time/update_actor_seconds": 0.92,
    "time/step_seconds": 3.42,
}


def table_text(samples: list[Sample], *, width: int = 80, **options: int) -> str:
    file = io.StringIO()
    print_samples(20, samples, file=file, width=width, **options)
    return file.getvalue()


def test_progress_line_has_the_numbers_that_matter_on_one_line():
    assert progress_line(12, 100, METRICS) == (
        "step  12/100  reward 1.235  eval 61.2%  approx_kl 0.0012  clip 8.1%  ev 0.314  "
        "1240 tok/s  3.4s: generate 1.2, actor 0.92"
    )
    assert progress_line(12, 100, METRICS, width=200) == (
        "step  12/100  reward 1.235  eval 61.2%  approx_kl 0.0012  clip 8.1%  ev 0.314  "
        "drift 2.1e-07  1240 tok/s  3.4s: generate 1.2, actor 0.92, log_prob 0.3"
    )


def test_progress_line_that_is_too_long_keeps_reward_and_seconds():
    line = progress_line(12, 100, METRICS, width=60)

    assert line == "step  12/100  reward 1.235  eval 61.2%  approx_kl 0.0012  1240 tok/s  3.4s"


@given(st.dictionaries(st.sampled_from([name for name, _, _ in FIELDS]), st.floats(-99, 99)))
def test_line_of_a_step_fits_150_columns(fields):
    line = progress_line(1000, 1000, METRICS | fields)

    assert len("[rank 0] 23:59:59 INFO " + line) <= 150
    assert "reward" in line and "3.4s" in line


def test_progress_line_without_metrics_is_the_step():
    assert progress_line(7, 10, {}) == "step  7/10"


def test_progress_line_shows_what_is_not_finite_as_nan():
    line = progress_line(1, 2, {"reward/mean": math.nan, "actor/approx_kl": math.inf})

    assert line == "step 1/2  reward nan  approx_kl nan"


def test_progress_line_of_a_long_step_has_no_exponents():
    assert progress_line(1, 1, {"time/step_seconds": 1234.5}).endswith("1234s")


def test_stages_lose_their_verbs_and_keep_their_order():
    assert stage_seconds(METRICS) == {
        "generate": 1.2,
        "log_prob": 0.3,
        "reward": 0.01,
        "actor": 0.92,
    }


def test_something_is_due_every_n_steps_and_never_for_0():
    assert [step for step in range(1, 25) if is_due(step, 10)] == [10, 20]
    assert not any(is_due(step, 0) for step in range(25))


def test_sample_table_holds_prompt_response_and_score():
    lines = table_text([Sample("47+38=", "85", 0.98765)]).splitlines()

    assert lines[0].rstrip() == "samples of step 20"
    assert any(all(part in line for part in ("47+38=", " 85 ", " 0.988 ")) for line in lines)


def test_sample_table_has_lines_between_rows_only_if_texts_are_long():
    short = [Sample("47+38=", "85", 1.0), Sample("1+1=", "2", 1.0)]
    long = [Sample("once upon a time " * 9, "85", 1.0), Sample("1+1=", "2", 1.0)]

    rules = [text.count("\n+--") for text in map(table_text, (short, long))]

    assert rules == [3, 4]


def test_sample_table_fits_80_and_120_columns_of_ascii_lines():
    sample = Sample("once upon a time " * 40, "x" * 900, -1.0)
    for width in (80, 120):
        text = table_text([sample] * 3, width=width)
        assert max(map(len, text.splitlines())) == width
        assert text.isascii()


def test_a_response_cannot_send_commands_to_the_terminal():
    response = "\x1b[31mred\x1b[0m \x07\r\u202e[bold]x[/bold]"
    text = table_text([Sample("a\nb", response, math.nan)], width=120)

    assert r"a\nb" in text
    assert r"\x1b[31mred\x1b[0m \x07\r\u202e[bold]x[/bold]" in text
    assert "nan" in text


@given(st.text())
def test_printable_text_has_no_hidden_character(text):
    shown = printable(text)

    assert all(unicodedata.category(character)[0] != "C" for character in shown)
    assert len(shown.splitlines()) <= 1


@given(st.text(), st.integers(0, 40))
def test_shortened_text_fits_and_keeps_both_ends(text, limit):
    short = shorten_text(text, limit)

    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text
    elif limit >= 8:
        assert short[0] == text[0] and short[-1] == text[-1] and " ... " in short


def test_curve_that_rises_is_drawn_from_bottom_left_to_top_right():
    title, *lines = text_curve("eval", [(0, 0.5), (10, 0.75), (20, 1.0)], width=21, height=5)

    assert title == "eval"
    assert lines == [
        "    1 |                  ..o",
        "      |             .....",
        "      |        ..o..",
        "0.625 |   .....",
        "  0.5 |o..",
        "      +---------------------",
        "       0             step 20",
    ]


def test_curve_of_one_point_and_of_a_flat_line_are_drawn():
    for points in ([(3, 0.0)], [(1, 2.0), (2, 2.0), (9, 2.0)]):
        assert sum(line.count("o") for line in text_curve("k", points)[1:]) == len(points)


def test_curve_without_finite_values_says_so():
    assert text_curve("k", [(1, math.nan)]) == ["k: no finite value"]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(-1e30, 1e30)),
        min_size=1,
        unique_by=lambda p: p[0],
    )
)
def test_any_curve_has_the_size_asked_for_and_marks_its_extremes(points):
    _, *plot, _, _ = text_curve("k", sorted(points), width=30, height=6)
    inside = [line.split("|", 1)[1] for line in plot]

    assert len(plot) == 6
    assert max(map(len, inside)) <= 30
    if len(points) <= 30:
        assert any(line.strip() for line in inside)


def test_samples_are_of_as_many_prompts_as_there_are() -> None:
    groups = np.repeat([7, 3, 9], 4)

    assert choose_positions(groups, per_group=1, most=4) == [
        0,
        1,
        4,
        8,
    ]  # then a second one of the first
    assert choose_positions(np.arange(20), per_group=1, most=4) == [0, 1, 2, 3]
    assert choose_positions(np.array([5, 5]), per_group=1, most=4) == [0, 1]
    assert choose_positions(groups, per_group=2, most=5) == [0, 1, 4, 5, 8]
    assert choose_positions(np.repeat([1, 2], 8), per_group=4, most=10) == [
        0,
        1,
        2,
        3,
        4,
        5,
        8,
        9,
        10,
        11,
    ]
