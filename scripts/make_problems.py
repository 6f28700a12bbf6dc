"""Writes problems for a chat model: made here, or from data files.

    python scripts/make_problems.py sums problems     # or differences, products, instructions
    python scripts/make_problems.py reasoning problems --task gcd --settings '{"max_value": 50}'
    python scripts/make_problems.py gsm8k $SPMDFLOW_DATA/gsm8k problems
    python scripts/make_problems.py countdown $SPMDFLOW_DATA/countdown problems

Writes problems/sums.train.jsonl, problems/sums.test.jsonl and so on; each row has "prompt" and what
its reward reads. No problem of a test file is in the training file: for sums, differences and
products neither of the two numbers in this or the other order. reasoning: problems of reasoning-gym
(pip install 'reasoning-gym>=0.1.25'). gsm8k and countdown: FOLDER/train.jsonl and test.jsonl, each
row as it was, and a prompt that says in which form the answer is wanted.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FORM = (
    "Think first, then answer, in this form: <think> your thoughts </think> "
    "<answer> your answer </answer>."
)


def chat(text: str) -> list[dict[str, str]]:
    """A prompt of one user message."""
    return [{"role": "user", "content": text}]


def of_gsm8k(row: Row) -> str:
    """The question; the answer wanted is a number."""
    return f"{row['question'].strip()}\n\n{FORM} The answer is a number."


def of_countdown(row: Row) -> str:
    """The numbers and what to make of them; the answer wanted is an expression."""
    numbers = ", ".join(map(str, row["numbers"]))
    return (
        f"Make {row['target']} from the numbers {numbers} with +, -, *, / and brackets; use each "
        f"number exactly once.\n\n{FORM} The answer is an expression such as (1 + 2) / 3."
    )


PROMPTS: dict[str, Callable[[Row], str]] = {
    "gsm8k": of_gsm8k,
    "countdown": of_countdown,
}


def sums(draw: random.Random, num_test: int) -> tuple[list[Row], list[Row]]:
    """Training and test rows: sums of two numbers of two digits."""
    return _pairs_of_numbers(draw, num_test, _sum)


def differences(draw: random.Random, num_test: int) -> tuple[list[Row], list[Row]]:
    """Training and test rows: the larger of two numbers of two digits, less the smaller."""
    return _pairs_of_numbers(draw, num_test, _difference)


def products(draw: random.Random, num_test: int) -> tuple[list[Row], list[Row]]:
    """Training and test rows: products of two numbers of two digits."""
    return _pairs_of_numbers(draw, num_test, _product)


def _sum(first: int, second: int) -> Row:
    text = f"What is {first} + {second}? Answer with the number only."
    return {"prompt": chat(text), "answer": str(first + second)}


def _difference(first: int, second: int) -> Row:
    more = max(first, second)
    less = min(first, second)
    text = f"What is {more} - {less}? Answer with the number only."
    return {"prompt": chat(text), "answer": str(more - less)}


def _product(first: int, second: int) -> Row:
    text = f"What is {first} * {second}?"
    return {"prompt": chat(text), "question": text, "answer": str(first * second)}


def _pairs_of_numbers(
    draw: random.Random, num_test: int, row_of: Callable[[int, int], Row]
) -> tuple[list[Row], list[Row]]:
    """Return training and test rows without a pair of numbers, in any order, in both.

    num_test pairs are held out, each in a random order. Of the others, each order is a training
    row; equal rows (differences in both orders) occur once.
    """
    pairs = []
    for low in range(10, 100):
        for high in range(low, 100):
            pairs.append((low, high))
    draw.shuffle(pairs)
    test = []
    for pair in pairs[:num_test]:
        test.append(row_of(*draw.sample(pair, 2)))
    train = {}
    for low, high in pairs[num_test:]:
        for row in (row_of(low, high), row_of(high, low)):
            train[row["prompt"][0]["content"]] = row
    rows = list(train.values())
    draw.shuffle(rows)
    return rows, test


TOPICS = (
    "a rainy day, a train ride, the moon, a school garden, an old clock, a mountain lake, a busy "
    "market, a sleeping cat, the first snow, a lost key, a summer night, a small island, a "
    "bakery, a long bridge, a lighthouse, a birthday, a quiet library, a river in spring, a "
    "football match, a broken bicycle, a farm, a thunderstorm, a city at night, a family dinner, "
    "a desert, a toy shop, a beach, a forest path, a winter morning, a street musician, a museum, "
    "a kite, a honey bee, a fishing boat, an apple tree, a hospital, a castle, a campfire, a "
    "robot, a spaceship"
).split(", ")
WORDS = (
    "blue, friend, slowly, window, music, water, golden, silent, story, light, paper, bread, "
    "stone, green, laughter, shadow, wind, secret, warm, little, bright, street, morning, dream"
).split(", ")
MOST_WORDS = (8, 10, 12, 15, 20)
FORMS = {
    "capitals": "Write it in capital letters only.",
    "question": "Write it as a question that ends with a question mark.",
    "list": "Write it as a list in which every line starts with a dash.",
    "quotes": "Put all of it between double quotation marks.",
}
"""Name of a form (spmdflow.rewards.instructions) -> how a prompt asks for it."""


def instructions(draw: random.Random, num_test: int) -> tuple[list[Row], list[Row]]:
    """Training and test rows: a short text about a topic, under three conditions.

    Conditions are a largest number of words, a word that must occur, and a form. Test topics and
    words occur in training, but not in this combination.
    """
    rows = []
    for topic in TOPICS:
        for word in WORDS:
            for form, request in FORMS.items():
                most = draw.choice(MOST_WORDS)
                text = (
                    f'Write about {topic}. Use at most {most} words. Use the word "{word}". '
                    f"{request}"
                )
                rows.append({"prompt": chat(text), "max_words": most, "word": word, "form": form})
    draw.shuffle(rows)
    return rows[num_test:], rows[:num_test]


MADE: dict[str, Callable[[random.Random, int], tuple[list[Row], list[Row]]]] = {
    "sums": sums,
    "differences": differences,
    "products": products,
    "instructions": instructions,
}


def reasoning(task: str, settings: dict[str, Any], seed: int) -> Iterator[Row]:
    """Problems of a task of reasoning-gym without end, each once.

    A row has "task", "settings" (JSON) and "seed", by which spmdflow.rewards.reasoning makes the
    problem again, and "answer" for people.
    """
    from reasoning_gym import create_dataset

    seen = set()
    while True:
        problem = create_dataset(task, size=1, seed=seed, **settings)[0]
        if problem["question"] not in seen:
            seen.add(problem["question"])
            yield {
                "prompt": chat(f"{problem['question'].strip()}\nReply with the answer only."),
                "task": task,
                "settings": json.dumps(settings),
                "seed": seed,
                "answer": str(problem["answer"]),
            }
        seed += 1


def main() -> None:
    """Both parts of one data set."""
    options = parse_options()
    draw = random.Random(options.seed)
    name = options.kind
    if options.kind in PROMPTS:
        train, test = (read(options, part) for part in ("train", "test"))
    elif options.kind == "reasoning":
        name = options.task
        problems = reasoning(options.task, json.loads(options.settings), options.seed)
        test = list(islice(problems, options.test))
        train = list(islice(problems, options.train))
    else:
        train, test = MADE[options.kind](draw, options.test)
    options.out.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", train), ("test", test)):
        path = options.out / f"{name}.{part}.jsonl"
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{path}: {len(rows)} problems")


def read(options: argparse.Namespace, part: str) -> list[Row]:
    """The rows of a part of a data set, each with its prompt."""
    lines = (options.folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for row in map(json.loads, lines):
        rows.append({"prompt": PROMPTS[options.kind](row), **row})
    return rows


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind in (*MADE, "reasoning", *PROMPTS):
        options = kinds.add_parser(kind)
        if kind in PROMPTS:
            options.add_argument("folder", type=Path, help="where train.jsonl and test.jsonl are")
        options.add_argument("out", type=Path, help="folder to write to")
        options.add_argument("--seed", type=int, default=0)
        if kind == "reasoning":
            options.add_argument("--task", required=True, help="of reasoning-gym")
            options.add_argument("--settings", default="{}", help="of the task, as JSON")
            options.add_argument("--train", type=int, default=4000, help="training problems")
        if kind not in PROMPTS:
            options.add_argument("--test", type=int, default=500, help="held-out problems")
    return parser.parse_args()


if __name__ == "__main__":
    main()
