"""Penalties for long responses. All scores are in -1 to 0, so use positive weights.

`row["response_tokens"]` is the number of tokens, including the end of sequence. The reward worker
adds it to every row. `objectives.advantage.add_overlong_penalty` is DAPO's, on token rewards.
"""

from __future__ import annotations

from math import cos, pi
from typing import Any


def linear(
    prompt: str, response: str, row: dict[str, Any], *, max_tokens: int, free_tokens: int = 0
) -> float:
    """-x, where x grows linearly from 0 at free_tokens to 1 at max_tokens and stays there."""
    return -_share(row["response_tokens"], free_tokens, max_tokens)


def cosine(
    prompt: str, response: str, row: dict[str, Any], *, max_tokens: int, free_tokens: int = 0
) -> float:
    """-(1 - cos(pi x)) / 2 of the same x: gentle at both ends (after Yeo et al. 2025, eq. 1)."""
    return -(1 - cos(pi * _share(row["response_tokens"], free_tokens, max_tokens))) / 2


def _share(num_tokens: int, free_tokens: int, max_tokens: int) -> float:
    if not 0 <= free_tokens < max_tokens:
        raise ValueError(
            f"got free_tokens {free_tokens}, expected 0 to max_tokens {max_tokens} - 1"
        )
    return min(max((num_tokens - free_tokens) / (max_tokens - free_tokens), 0.0), 1.0)
