"""Rewards for right answers and for form: what they take, what they do not, on any text."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmdflow.rewards import countdown, gsm8k, length
from spmdflow.rewards import format as form
from spmdflow.rewards.sentiment import lexicon_score, load_lexicon
from spmdflow.rewards.sentiment import score as sentiment

PIECES = ["\\boxed{", "{", "}", "####", "<answer>", "</answer>", "<think>", "</think>", "\n", "-"]
PIECES += ["(", ")", "1", "23", ",000", ".", "/", "*", "+", "=", "$", "\\frac{", " ", "x", "\\"]
GARBAGE = st.one_of(
    st.text(max_size=300), st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
)
ROW = {"answer": "#### 72", "numbers": [5, 22, 27], "target": 83, "response_tokens": 12}
FUNCTIONS: list[Callable[..., Any]] = [
    gsm8k.score,
    countdown.score,
    form.think_answer,
    form.boxed,
]


def scored(value: float | dict[str, float]) -> float:
    return value["score"] if isinstance(value, dict) else value


def data(name: str) -> list[dict[str, Any]]:
    """Rows of a file of the data folder; the test is skipped without one."""
    if "SPMDFLOW_DATA" not in os.environ:
        pytest.skip("SPMDFLOW_DATA names no data folder")
    lines = (Path(os.environ["SPMDFLOW_DATA"]) / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 eggs.\n#### 7", 7),
        ("#### 7\n#### 1,234,567", 1234567),
        ("#### -$1,000.50", Fraction("-1000.5")),
        ("#### $18 a day for 2 days", 18),
        ("#### 5 + 3 = 8 eggs", 8),
        ("#### none", None),
        (r"so \boxed{72}, not 73", 72),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{\$1{,}200\text{ dollars}}", 1200),
        (r"\boxed{x = \boxed{5}}", 5),
        (r"\boxed{12} and \boxed{13", 12),
        ("The answer is 3/4.", Fraction(3, 4)),
        ("It costs 10-5 = 5", 5),
        ("from 15 to -5", -5),
        ("10-5", 5),
        ("about 50%", 50),
        ("**42**", 42),
        ("1,2345", 2345),
        ("1/0", None),
        (".5", Fraction(1, 2)),
        ("3.", 3),
        ("no number", None),
        ("", None),
        ("7" * 101, None),
        ("<think>#### 5</think>so <answer>six: 6</answer> 9", 6),
        ("<think>maybe 5</think> It is 6", 6),
        ("\u0663 \u00b2", None),
        ("#### \u22127", -7),
        ("so it is \u2212 7 + \u22127", -7),
        ("#### - 7", -7),
        ("#### -$ 7", -7),
        (r"\boxed{- 7}", -7),
        ("#### x = - 7", -7),
        ("10 - 7", 7),
        ("#### 3 1/2", Fraction(7, 2)),
        ("#### -3 1/2", Fraction(-7, 2)),
        (r"\boxed{3\frac{1}{2}}", Fraction(7, 2)),
        ("It takes 3 1/2 hours", Fraction(7, 2)),
        ("#### 3 1/0", None),
    ],
)
def test_final_number_is_found_and_exact(text: str, number: object) -> None:
    assert gsm8k.final_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "#### 42 or 43",
        "#### either 42 eggs or 43 eggs",
        r"\boxed{42 \text{ or } 43}",
        r"\boxed{42, 43}",
        "#### 42; 43",
        "#### 42 and 43",
        "#### 42-43",
        "#### 42 43",
        "#### 42 to 43",
        "#### 1,2345",
        "The answer is 42 or 43.",
        "It is 42, or maybe 43",
        "42 eggs or 43 eggs",
    ],
)
def test_answer_that_offers_several_numbers_is_none_of_them(text: str) -> None:
    for right in ("1", "42", "43", "2345"):
        assert gsm8k.score("", text, {"answer": right})["score"] == 0
    assert gsm8k.final_number(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "#### 42 or 42.0",
        "#### 42 eggs in 7 boxes",
        "#### 42 (7 boxes)",
        "5 or 6 would be wrong. It is 42",
        "With 5 or more apples she pays 42",
        "#### 43\n#### 42",
    ],
)
def test_answer_with_one_number_may_mention_others(text: str) -> None:
    assert gsm8k.final_number(text) == 42


def test_strict_reading_takes_marked_numbers_only() -> None:
    def score(response: str) -> dict[str, Any]:
        return gsm8k.score("", response, {"answer": "#### 72"}, strict=True)

    right = {"score": 1, "accuracy": 1, "answered": 1, "answer": "72"}
    assert score("It is 72") == {"score": 0, "accuracy": 0, "answered": 0, "answer": None}
    assert score("#### 72") == score(r"\boxed{72}") == right


def test_equal_numbers_are_one_answer_to_vote_on() -> None:
    said = ["#### 1,000", "#### $1000", "so 1000.00", r"\boxed{2000/2}", "#### 1000.5"]

    answers = [gsm8k.score("", text, {"answer": "1000"})["answer"] for text in said]

    assert answers == ["1000"] * 4 + ["2001/2"]


def test_row_without_a_number_is_an_error_of_the_data() -> None:
    with pytest.raises(ValueError, match="got 'none' as the row's 'answer', expected a number"):
        gsm8k.score("", "1", {"answer": "none"})


@pytest.mark.parametrize("file", [pytest.param("train", marks=pytest.mark.drill), "test"])
def test_gsm8k_rows_verify_themselves_and_no_other_number(file: str) -> None:
    rows = data(f"gsm8k/{file}.jsonl")
    forms = ("#### {}", "The answer is {}.", r"so \boxed{{{}}}", "<answer>${} a day</answer>")

    for row in rows:
        number = gsm8k.final_number(row["answer"])
        assert number is not None
        assert number == Fraction(row["answer"].rpartition("####")[2].replace(",", "").strip())
        assert gsm8k.score("", row["answer"], row)["score"] == 1
        for words in forms:
            assert gsm8k.score("", words.format(number), row)["score"] == 1
            assert gsm8k.score("", words.format(number + 1), row)["score"] == 0
    assert len(rows) == {"train": 7473, "test": 1319}[file]


@pytest.mark.parametrize("file", [pytest.param("train", marks=pytest.mark.drill), "test"])
def test_countdown_solutions_verify_themselves_and_others_do_not(file: str) -> None:
    rows = data(f"countdown/{file}.jsonl")

    for row in rows:
        solution = row["solution"]
        target = row["target"]
        for response in (f"<answer>{solution}</answer>", f"I try:\n{solution} = {target}"):
            assert countdown.score("", response, row)["score"] == 1
        for wrong in (f"{solution} + 0", f"{target}", f"({solution}", f"1 * {solution}"):
            assert countdown.score("", f"<answer>{wrong}</answer>", row)["score"] == 0
        assert countdown.score("", solution, row | {"target": target + 1})["score"] == 0.1
    assert len(rows) == {"train": 4000, "test": 400}[file]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>(5 * 22) - 27</answer>", 1),
        ("so 5*22-27=83", 0),  # a line with other words
        ("hm\n5*22 - 27 = 83\n", 1),
        (r"\boxed{5 \times 22 - 27}", 1),
        ("<answer>5 \u00d7 22 \u2212 27</answer>", 1),
        ("<answer>22 * 5 + -27</answer>", 1),
        ("<answer>5 + 22 + 27</answer>", 0.1),
        ("<answer>5 / (22 - 22) + 27</answer>", 0),
        ("<answer>27 / (5 - 5) * 22</answer>", 0),
        ("<answer>83</answer>", 0),
        ("<answer>5 * 22 - 27 5</answer>", 0),
        ("<answer>522 - 27</answer>", 0),
        ("<answer>__import__('os')._exit(1)</answer>", 0),
        ("<answer>5 ** 22 - 27</answer>", 0),
        ("<answer>9**9**9**9</answer>", 0),
        ("<answer>" + "(" * 1000 + "</answer>", 0),
        ("<answer>" + "-" * 190 + "5</answer>", 0),
        ("", 0),
    ],
)
def test_countdown_takes_expressions_of_the_numbers_only(response: str, score: float) -> None:
    assert countdown.score("", response, ROW)["score"] == score


def test_countdown_may_leave_numbers_over_if_told() -> None:
    row = {"numbers": [5, 22, 27, 9], "target": 83}

    assert countdown.score("", "5*22 - 27", row)["score"] == 0
    assert countdown.score("", "5*22 - 27", row, use_all=False)["score"] == 1
    assert countdown.score("", "5+22+27+9", row, attempt=0.0)["score"] == 0


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(" ".join),
        inner.map("({})".format),
        inner.map("-{}".format),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_expressions_have_the_value_that_python_gives_them(text: str) -> None:
    exact = "".join(f"F({t})" if t.strip().isdigit() else t for t in _split(text))
    try:
        wanted = eval(exact, {"F": Fraction})
    except ZeroDivisionError:
        wanted = None

    assert countdown.evaluate(text)[0] == wanted


def _split(text: str) -> list[str]:
    return "".join(c if c.isdigit() else f"\0{c}\0" for c in text).split("\0")


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>a\n</think>\n\n<answer>b</answer>\n", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>.", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("a</think><answer>b</answer>", 0),
    ],
)
def test_think_answer_wants_each_tag_once_and_nothing_around(response: str, score: float) -> None:
    assert form.think_answer("", response, {}) == score


def test_form_may_start_in_the_prompt_or_be_a_pattern() -> None:
    assert form.think_answer("", "a</think><answer>b</answer>", {}, opened=True) == 1
    assert form.matches("", "x\n#### 5", {}, pattern=r"#### -?\d+\Z") == 1
    assert form.matches("", "x\n#### 5.", {}, pattern=r"#### -?\d+\Z") == 0
    assert [form.boxed("", text, {}) for text in (r"\boxed{1}", r"\boxed{}", r"\boxed{1")] == [
        1,
        0,
        0,
    ]


def test_length_penalties_are_0_then_fall_to_minus_1_and_meet_in_the_middle() -> None:
    for penalty in (length.linear, length.cosine):
        values = [
            penalty("", "", {"response_tokens": tokens}, free_tokens=10, max_tokens=20)
            for tokens in range(0, 31)
        ]
        assert values[:11] == [0] * 11 and values[20:] == [-1] * 11
        assert values == sorted(values, reverse=True)
        assert values[15] == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="got free_tokens 20, expected 0 to max_tokens 20 - 1"):
        length.linear("", "", {"response_tokens": 1}, free_tokens=20, max_tokens=20)


@given(GARBAGE)
@example("\\boxed{" * 50 + "}" * 51)
def test_no_text_is_an_error_and_scores_keep_their_range(text: str) -> None:
    for function in FUNCTIONS:
        assert 0 <= scored(function(text, text, ROW)) <= 1
    box = form.last_box(text)
    assert box is None or box in text


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(PIECES), st.sampled_from(PIECES))
def test_a_megabyte_of_anything_takes_less_than_the_limit(one: str, two: str) -> None:
    text = (one + two) * (1_000_000 // len(one + two))

    for function in FUNCTIONS:
        start = time.process_time()
        function("", text, ROW)
        assert time.process_time() - start < 3, function  # seconds; reward.sample_seconds is 10


def test_vader_lexicon_orders_stories_as_its_words_say() -> None:
    path = Path(os.environ.get("SPMDFLOW_DATA", "")) / "vader/vader_lexicon.txt"
    stories = [row["text"] for row in data("tinystories/stories.jsonl")[:200]]
    lexicon = load_lexicon(path)

    assert 7500 < len(lexicon) <= 7520 and all(-4 <= value <= 4 for value in lexicon.values())
    assert lexicon["happy"] == 2.7
    for story in stories:
        known = sentiment("Once ", story, {}, lexicon_path=str(path))
        assert known == lexicon_score(story, lexicon) and -1 <= known <= 1
        assert sentiment("", story + " horrible" * 40, {}, lexicon_path=str(path)) < known
    joined = sentiment("happy ", "dog", {}, lexicon_path=str(path), with_prompt=True)
    assert joined == lexicon_score("happy dog", lexicon) > 0
