"""Writes dialogues as chat messages from Anthropic's hh-rlhf, for SFT, preferences and PPO.

    python scripts/make_dialogues.py $SPMDFLOW_DATA/hh-rlhf problems

Reads FOLDER/harmless-base.test.jsonl.gz, where each line has two dialogues with the same beginning
that differ in the last answer. Writes, of the same dialogues,

    dialogues.sft.train.jsonl      {"messages": [...]}, the dialogue with the better answer
    dialogues.pairs.train.jsonl    {"prompt": [...], "chosen": "...", "rejected": "..."}
    dialogues.prompts.train.jsonl  {"prompt": [...]}, up to the last question

and the same for test. Every fifth dialogue is a test dialogue. Dialogues whose speakers do not take
turns, or whose two last answers are equal or empty, are left out. A warning: the dialogues are
about harmful things, and so are some of the better answers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path
from typing import Any

FILE = "harmless-base.test.jsonl.gz"
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}
TEST_EVERY = 5

Message = dict[str, str]


def messages_of(text: str) -> list[Message] | None:
    """The dialogue as messages; None unless user and assistant take turns, with the user first."""
    parts = _SPEAKER.split(text)
    if parts[0].strip():
        return None
    messages = []
    for speaker, said in zip(parts[1::2], parts[2::2], strict=True):
        messages.append({"role": ROLES[speaker], "content": said.strip()})
    roles = [message["role"] for message in messages]
    expected = ["user", "assistant"] * (len(messages) // 2)
    if not messages or roles != expected or not all(each["content"] for each in messages):
        return None
    return messages


def rows_of(line: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The row of each kind that a line of hh-rlhf becomes; None if it is left out."""
    chosen = messages_of(line["chosen"])
    rejected = messages_of(line["rejected"])
    if chosen is None or rejected is None or chosen[:-1] != rejected[:-1]:
        return None
    better = chosen[-1]["content"]
    worse = rejected[-1]["content"]
    if better == worse:
        return None
    return {
        "sft": {"messages": chosen},
        "pairs": {"prompt": chosen[:-1], "chosen": better, "rejected": worse},
        "prompts": {"prompt": chosen[:-1]},
    }


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help=f"where {FILE} is")
    parser.add_argument("out", type=Path, help="folder to write to")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {}
    number = 0
    with gzip.open(options.folder / FILE, "rt", encoding="utf-8") as file:
        for line in file:
            rows = rows_of(json.loads(line))
            if rows is None:
                continue
            part = "test" if number % TEST_EVERY == 0 else "train"
            number += 1
            for kind, row in rows.items():
                lines.setdefault(f"dialogues.{kind}.{part}.jsonl", []).append(json.dumps(row))
    for name, texts in lines.items():
        path = options.out / name
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        print(f"{path}: {len(texts)} rows")


if __name__ == "__main__":
    main()
