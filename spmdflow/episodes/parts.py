"""Scores of parts of an episode, as an environment returns them. Imports no torch.

In addition to "score", an environment may return

    "segment_scores": {KEY: number}   KEY: a name, or the id of a reply of the segment
    "turn_scores": {REPLY: number}    REPLY: the id of a reply
    "token_scores": {REPLY: [number for each token of the reply]}
    "trained": [NAME, ...]            whose segments are trained; without it all are

A name is the one in the URL of a request (`spmdflow.envs.client.named_url`); requests without one
have the name "policy".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spmdflow.rewards.child import InvalidScore

SCORES_BY_KEY = ("segment_scores", "turn_scores")
TOKEN_SCORES = "token_scores"
TRAINED = "trained"
PARTS = (*SCORES_BY_KEY, TOKEN_SCORES, TRAINED)
POLICY = "policy"
"""Name of the segments of requests without a name."""


def parts_of(value: object) -> dict[str, Any]:
    """Return the scores of parts in an environment's result; {} without any.

    InvalidScore if one has another form than the module says, or a number that is not finite.
    """
    if not isinstance(value, Mapping):
        return {}
    parts: dict[str, Any] = {}
    for name in PARTS:
        if name in value:
            parts[name] = value[name]
    if not are_parts(parts):
        forms = "{key: number}, token_scores {reply: [numbers]}, and trained [names]"
        raise InvalidScore(f"returned scores of parts in another form than {forms}: {parts!r:.200}")
    return parts


def are_parts(value: object) -> bool:
    """Whether a value may be the result of `parts_of`."""
    if not isinstance(value, dict) or not set(value) <= set(PARTS):
        return False
    for name in SCORES_BY_KEY:
        scores = value.get(name, {})
        if not _has_text_keys(scores) or not all(map(_is_number, scores.values())):
            return False
    by_reply = value.get(TOKEN_SCORES, {})
    if not _has_text_keys(by_reply):
        return False
    for numbers in by_reply.values():
        if not isinstance(numbers, list) or not all(map(_is_number, numbers)):
            return False
    names = value.get(TRAINED, [])
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _has_text_keys(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)
