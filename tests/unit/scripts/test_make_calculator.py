"""Questions with numbers in words, and dialogues that teach a call: how many, and what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from spmdflow.rewards.child import find_function
from tests.policy.house import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "make_calculator.py"
WORDS = re.compile(r"[a-z]+ hundred(?: [a-z]+(?:-[a-z]+)?)?", re.IGNORECASE)


def make(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    return subprocess.run(
        [sys.executable, SCRIPT, folder, *more], check=False, capture_output=True, text=True
    )


def rows_of(folder: Path, part: str) -> list[dict[str, Any]]:
    lines = (folder / f"calculator.{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def digits_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_dialogues_are_few_and_share_no_pair_of_numbers_with_any_question(tmp_path: Path) -> None:
    assert make(tmp_path, "--train", "400", "--test", "200").returncode == 0

    dialogues = rows_of(tmp_path, "dialogues")
    seen = set()
    for row in dialogues:
        a, b = digits_of(row["messages"][1]["content"])
        seen.add(frozenset((a, b)))
    products = {"train": set(), "test": set()}
    for part, found in products.items():
        for row in rows_of(tmp_path, part):
            (digits,) = digits_of(row["question"])
            other, rest = divmod(int(row["answer"]), digits)
            assert not rest and 100 <= other <= 999
            pair = frozenset((digits, other))
            assert pair not in found, "each pair once"
            found.add(pair)

    assert len(seen) == len(dialogues) <= 300
    assert (len(products["train"]), len(products["test"])) == (400, 200)
    assert not products["train"] & products["test"]
    assert not seen & (products["train"] | products["test"])


def test_dialogue_is_what_the_environment_says_and_scores_as_right(tmp_path: Path) -> None:
    assert make(tmp_path, "--dialogues", "20").returncode == 0
    tool = REPOSITORY / "algos" / "calculator" / "tool.py"
    answer_to_call = find_function(f"{tool}:answer_to_call")
    measured = find_function(f"{tool}:measured")

    for row in rows_of(tmp_path, "dialogues"):
        system, question, call, result, answer = row["messages"]
        a, b = digits_of(question["content"])
        assert system == rows_of(tmp_path, "test")[0]["prompt"][0]
        assert result["content"] == answer_to_call(call["content"]) == str(a * b)
        assert measured(row["messages"], {"answer": str(a * b)})["score"] == 1
        assert answer["role"] == "assistant"


def test_one_number_of_a_question_is_in_words(tmp_path: Path) -> None:
    assert make(tmp_path, "--train", "50").returncode == 0

    for row in rows_of(tmp_path, "train"):
        assert len(digits_of(row["question"])) == 1
        assert len(WORDS.findall(row["question"])) == 1
        assert row["prompt"][1]["content"] == row["question"]


def test_more_than_300_dialogues_are_refused_with_the_number(tmp_path: Path) -> None:
    made = make(tmp_path, "--dialogues", "301")

    assert made.returncode == 2
    assert "got 301, expected at most 300" in made.stderr
