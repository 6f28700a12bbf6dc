"""Does a response have the form that the prompt asked for? Score range of all: 0 or 1.

No column of the row is read.
"""

from __future__ import annotations

import re
from typing import Any

from spmdflow.rewards.final import last_box


def think_answer(prompt: str, response: str, row: dict[str, Any], *, opened: bool = False) -> float:
    """1 for "<think>...</think> <answer>...</answer>", each tag once, nothing around it but spaces.

    The form of DeepSeek-R1-Zero (2025, table 1). opened: the prompt ends with <think>, so the
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
    r"""1 if the regular expression fits somewhere (\A and \Z bind it; a dot takes newlines too)."""
    return float(re.search(pattern, response, re.DOTALL) is not None)
