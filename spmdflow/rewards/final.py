"""Where a response says its answer: behind ####, in a box, between tags. Time linear in its length.

Never raises, whatever the text.
"""

from __future__ import annotations

import re

_BOX_PARTS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def answer_part(text: str) -> str:
    """What counts as the answer: the last <answer>...</answer>, else all behind the last </think>.

    The whole text if it has neither.
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return text[start + len("<answer>") : end]
    return text.rpartition("</think>")[2]


def behind_mark(text: str) -> str | None:
    """The rest of the line behind the last ####; None without one."""
    before, mark, behind = text.rpartition("####")
    return behind.strip().partition("\n")[0].strip() if mark else None


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
    return None if found is None else text[slice(*found)].strip()
