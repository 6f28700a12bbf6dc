"""The format of a response: whether it is as the prompt asked, and where its answer is.

The rewards score 0 or 1 and read no column of the row. An answer stands after ####, in a box or
between tags; finding it takes time linear in the response's length and never raises.
"""

from __future__ import annotations

import re
from typing import Any


def think_answer(prompt: str, response: str, row: dict[str, Any], *, opened: bool = False) -> float:
    """1 for "<think>...</think> <answer>...</answer>", each tag once, nothing around it but spaces.

    The format of DeepSeek-R1-Zero (2025, table 1). opened: the prompt ends with <think>, so the
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
    """The result of a reward function for an answer (None: there is none).

    score: by default 1 if it is right, else 0, as accuracy. Equal answers must be equal texts.
    """
    right = float(is_right)
    answered = float(answer is not None)
    earned = right if score is None else score
    return {"score": earned, "accuracy": right, "answered": answered, "answer": answer}


_BOX_PARTS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def answer_part(text: str) -> str:
    """The part with the answer: the last <answer>...</answer>, else all after the last </think>.

    The whole text if it has neither.
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return text[start + len("<answer>") : end]
    return text.rpartition("</think>")[2]


def behind_mark(text: str) -> str | None:
    """The remainder of the line after the last ####; None without one."""
    before, mark, behind = text.rpartition("####")
    if mark:
        return behind.strip().partition("\n")[0].strip()
    return None


def last_box(text: str) -> str | None:
    r"""The contents of the last complete \boxed{...}, braces inside balanced; None without one."""
    opened: list[int | None] = []  # where each brace's contents start; None: no box
    found = None
    for part in _BOX_PARTS.finditer(text):
        if part[0].startswith("\\boxed"):
            opened.append(part.end())
        elif part[0] == "{":
            opened.append(None)
        elif part[0] == "}" and opened:
            start = opened.pop()
            found = found if start is None else (start, part.start())
    if found is None:
        return None
    return text[slice(*found)].strip()
