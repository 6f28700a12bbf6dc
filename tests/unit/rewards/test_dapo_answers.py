"""DAPO's scorer: the last "Answer:" line, normalised; 1 or -1."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from spmdflow.rewards.dapo import normalise, score
from tests.unit.rewards.test_answers import GARBAGE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("34", "34"),
        ("1,234", "1234"),
        ("1,234.5", "1,234.5"),
        ("x = 5", "5"),
        (r"$\boxed{42}$", "42"),
        (r"the area is $\frac12$ square units", r"\frac{1}{2}"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"12 \text{ inches}", "12"),
        (r"\$18", "18"),
        (r"45^\circ", "45"),
        (r"45^{\circ}", "45"),
        (r"\textbf{7}", "7"),
        (r"\overline{AB}", "AB"),
        (r"10{,}000", "10000"),
        (r"10,\!000", "10000"),
        (r"5\text{ and }6", "56"),
        (r"x,\text{ and }y", "x,y"),
        ("a dog", "dog"),
        (r"7\mbox{ cm}", "7"),
        ("20 degrees", "20"),
        (" 8 ", "8"),
    ],
)
def test_answers_are_normalised_as_minervas(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("so\nAnswer: 34", "34", 1),
        ("Answer: 33\nno,\nanswer : $34$", "34", 1),
        ("Answer: 34\nAnswer: 33", "34", -1),
        ("Answer:\n34", "34", 1),
        ("the answer is 34", "34", -1),
        (r"so \boxed{34}", "34", 1),
        (r"so \boxed{34} and \boxed{35", "34", -1),
        (r"\boxed{1,234}", "1234", -1),  # a box is compared letter by letter
        (r"Answer: 33 \boxed{34}", "34", -1),  # the line comes first
        ("Answer: 1,234", "1234", 1),
        ("Answer: 0.5", "1/2", -1),
        ("Answer: 34" + "." * 300, "34", -1),  # too far from the end
        ("", "34", -1),
    ],
)
def test_score_is_1_or_minus_1_by_the_last_answer_line(
    response: str, answer: str, expected: int
) -> None:
    found = score("", response, {"answer": answer})

    assert found["score"] == expected
    assert found["accuracy"] == (expected == 1)


def test_votes_are_the_normalised_answers_and_none_without_one() -> None:
    assert score("", "Answer: $x=1,000$", {"answer": "1000"})["answer"] == "1000"
    nothing = score("", "I do not know", {"answer": "1000"})
    assert nothing["answer"] is None and nothing["answered"] == 0


def test_column_may_be_another() -> None:
    assert score("", "Answer: 3", {"solution": "3"}, column="solution")["score"] == 1


@settings(max_examples=100, deadline=None)
@given(GARBAGE)
def test_no_text_is_an_error(text: str) -> None:
    assert score("", text, {"answer": "5"})["score"] in (-1, 1)
    assert score("", "Answer: " + text, {"answer": text})["score"] in (-1, 1)
