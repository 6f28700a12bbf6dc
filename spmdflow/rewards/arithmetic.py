"""Rewards of the bundled arithmetic task, its cost, and a random reward as control.

Score range of all: 0 to 1. `row["answer"]` is the exact answer as text.
"""

from __future__ import annotations

from typing import Any

from spmdflow.rewards.control import hash_score


def exact_match(prompt: str, response: str, row: dict[str, Any]) -> dict[str, float]:
    """Return score = (accuracy + share of right digits) / 2; accuracy = 1 for the exact answer.

    Digits are compared from the left, without white space around the response. The share is the
    number of equal ones divided by the length of the longer text, so a missing or surplus digit is
    wrong.
    """
    answer = str(row["answer"])
    prediction = response.strip()
    exact = float(prediction == answer)
    return {"score": (exact + _share_of_right_digits(prediction, answer)) / 2, "accuracy": exact}


def unwanted_digit(prompt: str, response: str, row: dict[str, Any]) -> float:
    """The cost of the safe RLHF demonstration: 1 if the response contains a 7, 0 otherwise.

    About one right answer in five has a 7, so a limit below that costs accuracy: reward and cost
    conflict, as helpfulness and harmlessness do.
    """
    return float("7" in response)


def shuffled(prompt: str, response: str, row: dict[str, Any]) -> dict[str, float]:
    """The control: a score that does not depend on whether the response is right.

    The score is a pseudo-random number in [0, 1), a hash of prompt and response, so that the
    expected score is the same for every response. accuracy is the true one. A comparison with
    another problem's answer is no control: the policy would learn the more frequent digits.
    """
    accuracy = exact_match(prompt, response, row)["accuracy"]
    return {"score": hash_score(prompt, response), "accuracy": accuracy}


def _share_of_right_digits(prediction: str, answer: str) -> float:
    right = sum(a == b for a, b in zip(prediction, answer))
    return right / max(len(prediction), len(answer), 1)
