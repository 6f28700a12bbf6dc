"""A score that has nothing to do with the answer, for control runs."""

from __future__ import annotations

from statistics import mean

from spmdflow.rewards.control import random_score


def test_score_is_the_same_for_the_same_response_and_says_nothing_of_the_answer() -> None:
    right = []
    wrong = []
    for number in range(2000):
        prompt = f"What is {number} + 1?"
        row = {"answer": str(number + 1)}
        right.append(random_score(prompt, str(number + 1), row)["score"])
        wrong.append(random_score(prompt, str(number + 2), row)["score"])

    assert random_score("What is 0 + 1?", "1", {"answer": "1"})["score"] == right[0]
    assert abs(mean(right) - mean(wrong)) < 0.05  # five standard errors
    assert 0.4 < mean(right) < 0.6 and max(right) < 1 and min(right) >= 0


def test_true_accuracy_of_the_named_reward_is_reported() -> None:
    row = {"answer": "68"}

    counted = random_score("23 + 45?", "It is 68.", row)
    missed = random_score("23 + 45?", "It is 67.", row)
    digits = "spmdflow.rewards.arithmetic:exact_match"
    exact = random_score("", "6", row, function=digits)
    dull = random_score("", "a", {}, function=f"{__name__}:always_right")

    assert counted["accuracy"] == 1.0 and counted["answered"] == 1.0 and missed["accuracy"] == 0.0
    assert exact["accuracy"] == 0.0
    assert dull["accuracy"] == 1.0


def always_right(prompt: str, response: str, row: dict[str, str]) -> float:
    """A reward that returns a number alone."""
    return 1.0
