"""Writes what the stages before RL learn from: short stories, pairs of them, pairs of dialogues.

    python scripts/make_story_pairs.py [--data $SPMDFLOW_DATA] [--out runs/story_pairs]

DATA is the folder of scripts/prepare_stories.py; its hh-rlhf/ may be missing. Every file comes out
the same each time. A short story is the opening of a story with as many of its next sentences as
fit into 56 tokens, so that one who imitates them ends within the 64 tokens of the RL runs.

    sft.train.jsonl, sft.test.jsonl            {"prompt": opening, "response": the sentences}
    pairs.train.jsonl, pairs.test.jsonl        {"prompt": "", "chosen", "rejected"}: two short
                                               stories, the more cheerful one first
    harmless.train.jsonl, harmless.test.jsonl  {"prompt", "chosen", "rejected"} of dialogues that
                                               part at the last answer

Held out from everything: the stories of prompts.test.jsonl and as many that are in neither prompt
file. Sentiments of a pair (VADER's lexicon, -1 to 1) differ by --least-gap or more.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scripts.prepare_stories import (
    LEXICON,
    PADDED,
    SENTENCE_END,
    STORIES,
    TEST,
    TRAIN,
    opening_of,
    read_rows,
    write_rows,
)
from spmdflow.rewards.sentiment import lexicon_score, load_lexicon

CONTINUATION_TOKENS = 56
HARMLESS = "hh-rlhf/harmless-base.test.jsonl.gz"
ANSWER = "\n\nAssistant:"
Row = dict[str, Any]


@dataclass(frozen=True)
class ShortStory:
    """An opening with a few sentences; sentiment of both together."""

    opening: str
    rest: str
    sentiment: float

    @property
    def text(self) -> str:
        """The whole."""
        return f"{self.opening} {self.rest}"


def short_stories(
    stories: Mapping[int, str], tokenizer: Any, lexicon: Mapping[str, float]
) -> dict[int, ShortStory]:
    """Index -> short story, of those with an opening and a sentence that fits."""
    made = {}
    for index, story in stories.items():
        opening = opening_of(story)
        if opening is None:
            continue
        rest = fitting_sentences(" ".join(story[len(opening) :].split()), tokenizer)
        if rest:
            text = f"{opening} {rest}"
            made[index] = ShortStory(opening, rest, lexicon_score(text, lexicon))
    return made


def fitting_sentences(text: str, tokenizer: Any) -> str:
    """The longest run of first sentences within CONTINUATION_TOKENS; may be empty."""
    best = ""
    for match in SENTENCE_END.finditer(text + " "):
        sentences = text[: match.end()]
        if len(tokenizer(sentences, add_special_tokens=False).input_ids) > CONTINUATION_TOKENS:
            break
        best = sentences
    return best


def pairs_of(
    stories: Sequence[ShortStory], *, number: int, least_gap: float, draw: random.Random
) -> list[Row]:
    """So many different pairs, the more cheerful story first."""
    pairs: dict[tuple[int, int], Row] = {}
    for _ in range(200 * number):
        first, second = draw.sample(range(len(stories)), 2)
        gap = stories[first].sentiment - stories[second].sentiment
        if gap >= least_gap:
            row = {"chosen": stories[first].text, "rejected": stories[second].text}
            pairs[first, second] = {"prompt": "", **row, "gap": round(gap, 4)}
        if len(pairs) == number:
            return list(pairs.values())
    raise SystemExit(
        f"pairs: got {len(pairs)} with a gap of {least_gap} from {len(stories)} stories, expected "
        f"{number}; lower --least-gap or their number"
    )


def harmless_pairs(path: Path) -> list[Row]:
    """Dialogues that are the same up to the last answer of one of them."""
    made = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            (prompt, chosen), (other, rejected) = (
                cut_at_last_answer(row[name]) for name in ("chosen", "rejected")
            )
            if prompt == other and chosen and rejected and chosen != rejected:
                made.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return made


def cut_at_last_answer(dialogue: str) -> tuple[str, str]:
    """What was said up to "Assistant:", and what the assistant answers last."""
    place = dialogue.rindex(ANSWER) + len(ANSWER)
    return dialogue[:place], dialogue[place:].strip()


def make(args: argparse.Namespace) -> list[str]:
    """Write every file; one sentence each."""
    tokenizer = AutoTokenizer.from_pretrained(args.data / PADDED)
    every = dict(enumerate(row["text"] for row in read_rows(args.data / STORIES)))
    short = short_stories(every, tokenizer, load_lexicon(args.data / LEXICON))
    train, test = ({r["story_index"] for r in read_rows(args.data / n)} for n in (TRAIN, TEST))
    draw = random.Random(args.seed)
    free = sorted(set(short) - train - test)
    held_out = test | set(draw.sample(free, min(len(test), len(free) // 2)))
    parts = {
        "train": [story for index, story in short.items() if index not in held_out],
        "test": [story for index, story in short.items() if index in held_out],
    }
    said = []
    for part, number in (("train", args.num_train), ("test", args.num_test)):
        rows = [{"prompt": s.opening, "response": s.rest} for s in parts[part]]
        write_rows(args.out / f"sft.{part}.jsonl", rows)
        pairs = pairs_of(parts[part], number=number, least_gap=args.least_gap, draw=draw)
        write_rows(args.out / f"pairs.{part}.jsonl", pairs)
        gaps = sorted(pair["gap"] for pair in pairs)
        middle = gaps[len(gaps) // 2]
        said.append(
            f"{part}: {len(rows)} short stories, {number} pairs, gap from {gaps[0]:.2f}, "
            f"median {middle:.2f}"
        )
    if (args.data / HARMLESS).is_file():
        said.append(make_harmless(args, draw))
    return said


def make_harmless(args: argparse.Namespace, draw: random.Random) -> str:
    """Write the dialogues, a fifth of them held out."""
    rows = harmless_pairs(args.data / HARMLESS)
    draw.shuffle(rows)
    cut = len(rows) // 5
    for part, some in (("test", rows[:cut]), ("train", rows[cut:])):
        write_rows(args.out / f"harmless.{part}.jsonl", some)
    return f"harmless: {len(rows) - cut} pairs to train, {cut} to test"


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("SPMDFLOW_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None, help="folder")
    parser.add_argument("--out", type=Path, default="runs/story_pairs", help="folder to make")
    parser.add_argument("--num-train", type=int, default=10000, help="pairs to train on")
    parser.add_argument("--num-test", type=int, default=1500, help="pairs held out")
    parser.add_argument("--least-gap", type=float, default=0.25, help="of a pair's sentiments")
    parser.add_argument("--seed", type=int, default=0, help="of every choice")
    return parser.parse_args()


if __name__ == "__main__":
    for sentence in make(parse_args()):
        print(sentence)
