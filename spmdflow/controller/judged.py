"""What the scorer said of generated responses, sample by sample, on the controller.

Texts and numbers come as values that are shown, counted as fetched bytes; no tensor of a batch
that trains passes here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spmdflow.checkpoint.disk import write_atomically
from spmdflow.controller.batch import Batch
from spmdflow.tracking.estimate import normal_answer

ACCURACY, ANSWER = "accuracy", "answer"
"""Names under which a reward function says whether a response is right, and what it answers."""


class Judged(NamedTuple):
    """One scored response."""

    text: str
    score: float | None
    """None: the reward function failed, and the row was dropped."""
    right: float
    """accuracy if the function reports it, else 1 for a score of at least 1, else 0."""
    answer: str | None
    """answer if the function reports it (None: there is none), else the text, spaces single."""
    num_tokens: int

    @classmethod
    def of(cls, text: str, score: float, terms: Mapping[str, Any], num_tokens: int) -> Judged:
        """From a row's columns; terms: what the function returned besides the score."""
        right = terms[ACCURACY] if ACCURACY in terms else float(score >= 1)
        answer = terms[ANSWER] if ANSWER in terms else normal_answer(text)
        if score != score:  # nan
            return cls(text, None, 0.0, None, num_tokens)
        return cls(text, score, right, None if answer is None else str(answer), num_tokens)


def judged(scored: Batch) -> list[list[Judged]]:
    """The samples of each prompt, prompts and samples in the order of the rows; waits for them."""
    values = scored.fetch_for("evaluation", "response_text", "scores", "score_terms")
    rows = zip(*map(list, values.values()), scored.lengths("responses").tolist(), strict=True)
    groups: dict[int, list[Judged]] = {}
    for group, (text, score, terms, num_tokens) in zip(scored.parents.tolist(), rows, strict=True):
        sample = Judged.of(str(text), float(score), json.loads(str(terms)), num_tokens)
        groups.setdefault(group, []).append(sample)
    return list(groups.values())


def write_judged(
    path: Path,
    greedy_rows: Batch,
    greedy: Sequence[Sequence[Judged]],
    sampled: Sequence[Sequence[Judged]],
    numbers: Mapping[str, Mapping[int, float]],
) -> None:
    """One JSON line for each prompt: text, other fields, responses and its share of `numbers`.

    numbers: by name, then by the prompt's place; prompts with a failed row have none.
    """
    values = greedy_rows.fetch_for("evaluation", "prompt_text", "row")
    lines = []
    for place, (prompt, row) in enumerate(zip(values["prompt_text"], values["row"], strict=True)):
        record = {
            "prompt": str(prompt),
            "row": json.loads(str(row)),
            "greedy": greedy[place][0]._asdict(),
            "samples": [sample._asdict() for sample in (sampled[place] if sampled else ())],
            **{
                name: of_prompts[place]
                for name, of_prompts in numbers.items()
                if place in of_prompts
            },
        }
        lines.append(json.dumps(record) + "\n")
    write_atomically(path, "".join(lines).encode())
