"""Problems that are made here: what a row has, and that no test problem is trained on."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spmdflow.rewards import instructions, reasoning
from tests.policy.house import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "make_problems.py"


def make(folder: Path, kind: str, *more: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and test rows of a kind."""
    name = more[more.index("--task") + 1] if "--task" in more else kind
    subprocess.run([sys.executable, SCRIPT, kind, folder, *more], check=True, capture_output=True)
    rows = []
    for part in ("train", "test"):
        lines = (folder / f"{name}.{part}.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
    return rows[0], rows[1]


def text_of(row: dict[str, Any]) -> str:
    (message,) = row["prompt"]
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize(("kind", "sign"), [("sums", "+"), ("differences", "-")])
def test_no_pair_of_numbers_is_trained_and_tested_in_any_order(
    tmp_path: Path, kind: str, sign: str
) -> None:
    train, test = make(tmp_path, kind, "--test", "100")

    pairs: list[set[frozenset[int]]] = []
    for rows in (train, test):
        seen = set()
        for row in rows:
            first, second = map(int, re.findall(r"\d+", text_of(row)))
            assert f"{first} {sign} {second}?" in text_of(row)
            assert int(row["answer"]) == (first + second if sign == "+" else first - second) >= 0
            seen.add(frozenset((first, second)))
        assert len({text_of(row) for row in rows}) == len(rows), "each prompt once"
        pairs.append(seen)
    assert len(pairs[1]) == 100
    assert not pairs[0] & pairs[1]
    assert len(pairs[0] | pairs[1]) == 90 * 91 // 2, "all pairs of numbers of two digits"


def test_another_seed_makes_other_test_problems(tmp_path: Path) -> None:
    _, first = make(tmp_path / "a", "sums")
    _, again = make(tmp_path / "b", "sums")
    _, other = make(tmp_path / "c", "sums", "--seed", "1")

    assert len(first) == 500
    assert first == again
    assert first != other


def test_instructions_have_what_their_rewards_read(tmp_path: Path) -> None:
    train, test = make(tmp_path, "instructions")

    assert len(test) == 500 and len(train) > 3000
    assert not {*map(text_of, train)} & {*map(text_of, test)}
    for row in (*train[:50], *test[:50]):
        assert f"at most {row['max_words']} words" in text_of(row)
        assert f'"{row["word"]}"' in text_of(row)
        response = f"- SO {row['word'].upper()} IS IT?"
        assert instructions.length("", response, row) == instructions.word("", response, row) == 1
        assert instructions.form("", response, row) == (row["form"] != "quotes")


@pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="needs reasoning-gym: pip install 'reasoning-gym>=0.1.25'",
)
def test_rows_of_reasoning_gym_are_scored_by_task_and_seed(tmp_path: Path) -> None:
    words = ("--task", "gcd", "--settings", '{"max_value": 50}', "--train", "20", "--test", "10")
    train, test = make(tmp_path, "reasoning", *words)

    assert (len(train), len(test)) == (20, 10)
    assert not {*map(text_of, train)} & {*map(text_of, test)}
    for row in (*train, *test):
        assert text_of(row).endswith("Reply with the answer only.")
        assert reasoning.score("", row["answer"], row)["score"] == 1
