"""The reward of `bench.py trl`, for both trainers: the share of different letters in a text."""

from __future__ import annotations

from typing import Any


def different_letters(prompt: str, response: str, row: dict[str, Any]) -> float:
    """0 to 1: different characters of the response, per character."""
    return len(set(response)) / max(len(response), 1)
