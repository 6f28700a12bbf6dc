"""Writes the bundled preference pairs: sums with their answer and one that is off by 20 to 60.

    python scripts/make_pairs.py

Reads algos/arithmetic/{train,eval}.jsonl, writes pairs_train.jsonl and pairs_eval.jsonl beside
them, the same bytes every time.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "algos" / "arithmetic"
SIZES = {"train": 2048, "eval": 512}
OFF_BY = tuple(sign * off for sign in (-1, 1) for off in range(20, 61))


def pairs_of(lines: list[str], draw: random.Random) -> list[str]:
    """A pair for each sum; both answers are positive numbers."""
    made = []
    for line in lines:
        row = json.loads(line)
        right = int(row["answer"])
        wrong = draw.choice([right + off for off in OFF_BY if right + off > 0])
        pair = {"prompt": row["prompt"], "chosen": str(right), "rejected": str(wrong)}
        made.append(json.dumps(pair))
    return made


def main() -> None:
    """Both files."""
    for part, size in SIZES.items():
        lines = (FOLDER / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
        draw = random.Random(f"pairs-{part}")
        pairs = pairs_of(draw.sample(lines, size), draw)
        (FOLDER / f"pairs_{part}.jsonl").write_text("\n".join(pairs) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
