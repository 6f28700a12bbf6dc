"""Conditions of a prompt, by examples; problems of reasoning-gym by its own answers."""

from __future__ import annotations

import importlib.util

import pytest

from spmdflow.rewards import instructions, reasoning

WITHOUT = importlib.util.find_spec("reasoning_gym") is None


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("The moon is bright.", True),
        ("It's a well-known old story", True),
        ("One, two, three, four, five, six.", False),
        ("Moon light", False),
        ("", False),
    ],
)
def test_a_response_has_three_words_up_to_the_limit(response: str, right: bool) -> None:
    assert instructions.length("", response, {"max_words": 5}) == right


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("A blue boat rests.", True),
        ("SO BLUE IS IT", True),
        ("Blueberries are very sweet.", False),
        ("Blue.", False),
    ],
)
def test_the_required_word_is_a_word_of_its_own(response: str, right: bool) -> None:
    assert instructions.word("", response, {"word": "blue"}) == right


@pytest.mark.parametrize(
    ("form", "response", "right"),
    [
        ("capitals", "THE OLD CLOCK, 1920.", True),
        ("capitals", "THE OLD clock", False),
        ("question", "Is it a cat? ", True),
        ("question", "Is it? A cat.", False),
        ("list", "- one apple\n\n- two pears", True),
        ("list", "Fruit:\n- one apple", False),
        ("list", "one two three", False),
        ("quotes", '"A rainy day begins"', True),
        ("quotes", 'He said "no" to me', False),
        ("quotes", "", False),
    ],
)
def test_forms(form: str, response: str, right: bool) -> None:
    assert instructions.form("", response, {"form": form}) == right


def test_an_unknown_form_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="got form 'haiku', expected one of capitals, question"):
        instructions.form("", "one two three", {"form": "haiku"})


@pytest.mark.skipif(WITHOUT, reason="needs reasoning-gym: pip install 'reasoning-gym>=0.1.25'")
@pytest.mark.parametrize("frame", ["{}", "<think>so</think> {}", "I say <answer> {} </answer>"])
def test_a_problem_of_reasoning_gym_is_made_again_and_scored(frame: str) -> None:
    settings = '{"max_terms": 2}'
    _, problem = reasoning.find_problem("chain_sum", 7, settings=settings)
    row = {"task": "chain_sum", "seed": 7, "settings": settings}

    right = reasoning.score("", frame.format(problem["answer"]), row)
    assert (right["score"], right["accuracy"], right["answered"]) == (1.0, 1.0, 1.0)
    wrong = reasoning.score("", frame.format("no number"), row)
    assert wrong["accuracy"] == 0.0 and wrong["score"] < 1
    assert reasoning.score("", "", row)["answered"] == 0.0


def test_weighted_sum_of_the_three_conditions() -> None:
    row = {"max_words": 5, "word": "blue", "form": "question"}
    assert instructions.weighted_sum("", "Is the boat blue?", row) == pytest.approx(1.0)
    assert instructions.weighted_sum("", "The boat is blue.", row) == pytest.approx(0.6)
    assert instructions.weighted_sum("", "Is it so very big and tall?", row) == pytest.approx(0.4)
