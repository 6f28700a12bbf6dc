"""Writes problems that say in which form the answer is wanted, from GSM8K or countdown rows.

    python scripts/make_problems.py gsm8k $SPMDFLOW_DATA/gsm8k problems
    python scripts/make_problems.py countdown $SPMDFLOW_DATA/countdown problems

Reads FOLDER/train.jsonl and test.jsonl, writes problems/gsm8k.train.jsonl and so on: the row as
it was, and its "prompt". algos/grpo_gsm8k.yaml and grpo_countdown.yaml read them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORM = (
    "Think first, then answer, in this form: <think> your thoughts </think> "
    "<answer> your answer </answer>."
)


def of_gsm8k(row: dict[str, Any]) -> str:
    """The question; the answer wanted is a number."""
    return f"{row['question'].strip()}\n\n{FORM} The answer is a number."


def of_countdown(row: dict[str, Any]) -> str:
    """The numbers and what to make of them; the answer wanted is an expression."""
    numbers = ", ".join(map(str, row["numbers"]))
    return (
        f"Make {row['target']} from the numbers {numbers} with +, -, *, / and brackets; use each "
        f"number exactly once.\n\n{FORM} The answer is an expression such as (1 + 2) / 3."
    )


PROMPTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "gsm8k": of_gsm8k,
    "countdown": of_countdown,
}


def main() -> None:
    """Both parts of one data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=PROMPTS)
    parser.add_argument("folder", type=Path, help="where train.jsonl and test.jsonl are")
    parser.add_argument("out", type=Path, help="folder to write to")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        lines = (chosen.folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = map(json.loads, lines)
        made = [json.dumps({"prompt": PROMPTS[chosen.kind](row), **row}) for row in rows]
        path = chosen.out / f"{chosen.kind}.{part}.jsonl"
        path.write_text("\n".join(made) + "\n", encoding="utf-8")
        print(f"{path}: {len(made)} problems")


if __name__ == "__main__":
    main()
