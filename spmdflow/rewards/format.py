"""Rewards for the format of a response, and functions that find its answer.

The rewards score 0 or 1 and read no column of the row. An answer follows ####, or is in a box or
between tags. Finding it takes time linear in the response's length and never raises.
"""

from __future__ import annotations

import re
from typing import Any


def think_answer(prompt: str, response: str, row: dict[str, Any], *, opened: bool = False) -> float:
    """Return 1 for "<think>...</think> <answer>...</answer>", otherwise 0.

    Each tag must be there once, with only white space before, between and after the two parts. The
    format of DeepSeek-R1-Zero (2025, table 1). opened: the prompt ends with <think>, so the
    response starts inside it.
    """
    text = "<think>" + response if opened else response
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags):
        return 0.0
    text = text.strip()
    thought, _, rest = text.removeprefix("<think>").partition("</think>")
    framed = text.startswith("<think>") and text.endswith("</answer>")
    return float(framed and rest.lstrip().startswith("<answer>") and "<answer>" not in thought)


def boxed(prompt: str, response: str, row: dict[str, Any]) -> float:
    r"""1 if the response has a complete \boxed{...} that is not empty."""
    return float(bool(last_box(response)))


def matches(prompt: str, response: str, row: dict[str, Any], *, pattern: str) -> float:
    r"""1 if the regular expression matches anywhere (\A, \Z anchor it; a dot matches newlines)."""
    return float(re.search(pattern, response, re.DOTALL) is not None)


def grade(answer: str | None, is_right: bool, *, score: float | None = None) -> dict[str, Any]:
    """Return the result dict of a reward function: score, accuracy, answered and answer.

    answer: None if there is none (answered = 0). Equal answers must be equal texts. accuracy is 1
    if is_right, otherwise 0. score: accuracy by default.
    """
    right = float(is_right)
    answered = float(answer is not None)
    earned = right if score is None else score
    return {"score": earned, "accuracy": right, "answered": answered, "answer": answer}


_BOX_PARTS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def answer_part(text: str) -> str:
    """Return the part of the text that contains the answer.

    It is the contents of the last <answer>...</answer>, otherwise everything after the last
    </think>, otherwise the complete text.
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return text[start + len("<answer>") : end]
    return text.rpartition("</think>")[2]


def text_after_mark(text: str) -> str | None:
    """Return the text after the last ####, up to its line's end; None without one.

    Blank lines between are skipped.
    """
    before, mark, behind = text.rpartition("####")
    if mark:
        return behind.strip().partition("\n")[0].strip()
    return None


def last_box(text: str) -> str | None:
    r"""Return the contents of the last complete \boxed{...}, stripped; None without one.

    Braces must be balanced, not counting those after a backslash. Of nested boxes the outer one
    closes last, and so counts.
    """
    open_braces: list[int | None] = []  # start of each box's contents; None for other braces
    span = None
    for part in _BOX_PARTS.finditer(text):
        if part[0].startswith("\\boxed"):
            open_braces.append(part.end())
        elif part[0] == "{":
            open_braces.append(None)
        elif part[0] == "}" and open_braces:
            start = open_braces.pop()
            span = span if start is None else (start, part.start())
    if span is None:
        return None
    return text[slice(*span)].strip()
