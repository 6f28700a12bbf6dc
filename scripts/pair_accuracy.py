"""Judge a reward model on held-out pairs with transformers alone: accuracy and its interval.

    python scripts/pair_accuracy.py --model RUN_DIR/export/reward_model [--pairs FILE] [--json OUT]

A pair counts as right if the chosen text scores higher, as half if both score the same. Pairs share
texts, so the 95 % interval is a bootstrap over texts: texts are drawn with replacement, and a pair
weighs as often as both of its texts were drawn together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

PAIRS = Path("runs/story_pairs/pairs.test.jsonl")


@torch.no_grad()
def scores_of(model: Any, tokenizer: Any, texts: list[tuple[str, str]]) -> Tensor:
    """(N,) score of each (prompt, answer) at the token that ends it, 64 at a time."""
    rows = []
    for prompt, answer in texts:
        ids = tokenizer(prompt).input_ids + tokenizer(answer, add_special_tokens=False).input_ids
        rows.append(torch.tensor([*ids, tokenizer.eos_token_id]))
    found = []
    for start in range(0, len(rows), 64):
        some = rows[start : start + 64]
        joined = pad_sequence(some, batch_first=True)  # right padding: causal, needs no mask
        hidden = model.model(input_ids=joined).last_hidden_state
        last = torch.tensor([len(row) - 1 for row in some])
        found.append(model.score(hidden[torch.arange(len(some)), last]).squeeze(-1))
    return torch.cat(found)


def interval(right: Tensor, pairs: Tensor, *, num_texts: int, draws: int, seed: int) -> list[float]:
    """95 % bootstrap interval of the mean of right (P,) over texts; pairs (P, 2): their numbers."""
    generator = torch.Generator().manual_seed(seed)
    means = []
    for _ in range(draws):
        drawn = torch.randint(num_texts, (num_texts,), generator=generator)
        counts = torch.bincount(drawn, minlength=num_texts).double()
        weights = counts[pairs[:, 0]] * counts[pairs[:, 1]]
        means.append((weights * right).sum() / weights.sum())
    ends = torch.stack(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return [round(float(end), 4) for end in ends]


def judge(folder: Path, file: Path, *, draws: int, seed: int) -> dict[str, Any]:
    """Accuracy, interval, and what it was measured on."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    places: dict[tuple[str, str], int] = {}
    numbers = [
        [
            places.setdefault((row["prompt"], row[name]), len(places))
            for name in ("chosen", "rejected")
        ]
        for row in rows
    ]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = scores_of(model, AutoTokenizer.from_pretrained(folder), list(places))
    pairs = torch.tensor(numbers)
    margins = scores[pairs[:, 0]] - scores[pairs[:, 1]]
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    return {
        "accuracy": round(float(right.mean()), 4),
        "interval": interval(right, pairs, num_texts=len(places), draws=draws, seed=seed),
        "num_pairs": len(rows),
        "num_texts": len(places),
        "least_gap": min((row["gap"] for row in rows if "gap" in row), default=None),
    }


def main() -> None:
    """Print and write the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the reward model")
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="held-out pairs")
    parser.add_argument("--draws", type=int, default=1000, help="of the bootstrap")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--json", type=Path, help="also write it there")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    verdict = judge(args.model, args.pairs, draws=args.draws, seed=args.seed)
    print(json.dumps(verdict))
    if args.json:
        args.json.write_text(json.dumps(verdict) + "\n")


if __name__ == "__main__":
    main()
