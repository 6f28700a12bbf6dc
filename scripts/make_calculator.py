"""Writes questions about products of three-digit numbers, and dialogues that teach a tool call.

    python scripts/make_calculator.py problems [--dialogues 100] [--test 300] [--seed 0]

Writes

    calculator.train.jsonl      {"prompt": [...], "question": "...", "answer": "204383"}
    calculator.test.jsonl       the same, held out
    calculator.dialogues.jsonl  {"messages": [...]}: question, thought and call, result, answer

for algos/calculator/tool.py, whose system prompt and results the dialogues have. No two numbers,
in either order, occur in more than one row of all three files.

In the dialogues both numbers are written in digits: they teach the call, and nothing else. In the
questions one of the two is written in words ("What is 347 times five hundred eighty-nine?"). To
read it is what a policy has to learn from its scores.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "algos" / "calculator"))

import tool  # noqa: E402

Row = dict[str, Any]

MOST_DIALOGUES = 300
QUESTIONS = (
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "Multiply {a} by {b}.",
    "What is the product of {a} and {b}?",
    "A hall has {a} rows of {b} seats. How many seats are there?",
    "One box holds {a} apples. How many apples are in {b} boxes?",
    "A ticket costs {a} dollars. What do {b} tickets cost?",
    "A machine makes {a} screws an hour. How many does it make in {b} hours?",
    "There are {b} books on each of {a} shelves. How many books are there?",
    "A page has {a} words. How many words do {b} pages have?",
)

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


def main() -> None:
    """Write the three files."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(options.seed)
    wanted = {"test": options.test, "dialogues": options.dialogues, "train": options.train}
    pairs = distinct_pairs(draw, sum(wanted.values()))
    for part, number in wanted.items():
        rows = []
        for place in range(number):
            a, b = pairs.pop()
            form = QUESTIONS[place % len(QUESTIONS)]
            if part == "dialogues":
                rows.append(dialogue(form.format(a=a, b=b), a, b))
            else:
                rows.append(problem(question_in_words(form, a, b, draw), a * b))
        draw.shuffle(rows)
        path = options.out / f"calculator.{part}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


def distinct_pairs(draw: random.Random, number: int) -> list[tuple[int, int]]:
    """So many pairs of numbers from 100 to 999, none of which occurs again in any order."""
    seen = set()
    pairs = []
    while len(pairs) < number:
        pair = (draw.randint(100, 999), draw.randint(100, 999))
        if frozenset(pair) not in seen:
            seen.add(frozenset(pair))
            pairs.append(pair)
    return pairs


def question_in_words(form: str, a: int, b: int, draw: random.Random) -> str:
    """A question with one of the two numbers, drawn at random, in words."""
    if draw.random() < 0.5:
        text = form.format(a=in_words(a), b=b)
    else:
        text = form.format(a=a, b=in_words(b))
    return text[0].upper() + text[1:]


def in_words(number: int) -> str:
    """A number from 1 to 999 in words, such as "five hundred eighty-nine"."""
    hundreds, rest = divmod(number, 100)
    words = []
    if hundreds:
        words += [ONES[hundreds], "hundred"]
    if rest >= 20:
        tens, ones = divmod(rest, 10)
        words.append("-".join([TENS[tens], ONES[ones]] if ones else [TENS[tens]]))
    elif rest:
        words.append(ONES[rest])
    return " ".join(words)


def problem(question: str, answer: int) -> Row:
    """A row to be played: what the policy reads first, and what the environment reads."""
    row = {"question": question, "answer": str(answer)}
    return {"prompt": tool.first_messages(tool.SYSTEM_WITH_THOUGHTS, row), **row}


def dialogue(question: str, a: int, b: int) -> Row:
    """A whole conversation in which the calculator is called and its result is the answer."""
    said = f"<think>I need {a} * {b}.</think><tool_call>{a} * {b}</tool_call>"
    messages = tool.first_messages(tool.SYSTEM_WITH_THOUGHTS, {"question": question})
    messages.append({"role": "assistant", "content": said})
    messages.append({"role": "user", "content": tool.answer_to_call(said)})
    messages.append({"role": "assistant", "content": str(a * b)})
    return {"messages": messages}


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--dialogues", type=int, default=100, help="at most 300")
    parser.add_argument("--test", type=int, default=300, help="held-out questions")
    parser.add_argument("--train", type=int, default=4000, help="questions to train on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.dialogues > MOST_DIALOGUES:
        parser.error(
            f"--dialogues: got {options.dialogues}, expected at most {MOST_DIALOGUES}; the point "
            "is that a few teach the call, and the rest is learnt from the score"
        )
    return options


if __name__ == "__main__":
    main()
