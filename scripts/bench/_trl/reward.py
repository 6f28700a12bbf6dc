"""The rewards of `bench.py trl` and `trl_sums`, for both trainers."""

from __future__ import annotations

import re
from typing import Any


def different_letters(prompt: str, response: str, row: dict[str, Any]) -> float:
    """0 to 1: different characters of the response, per character."""
    return len(set(response)) / max(len(response), 1)


def last_number(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1 if the last number of the response is the row's answer, else 0."""
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and numbers[-1] == row["answer"])


REWARDS = {"different_letters": different_letters, "last_number": last_number}
