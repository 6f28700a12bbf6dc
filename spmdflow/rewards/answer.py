"""What a reward function returned, as plain finite numbers and the answer it read."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


class BadAnswer(ValueError):
    """A result that is no score; the message is the rest of "the function ..."."""


def scores_of(value: object) -> dict[str, Any]:
    """{"score": float, ...} of a float or a dict; BadAnswer if there is no finite score.

    Further entries of a dict are kept if they are numbers, and must then be finite. "answer", what
    the response answers in a form in which equal answers are equal, is kept as text (None: there
    is none); evaluations vote on it.
    """
    if not isinstance(value, dict):
        return {"score": _number("", value)}
    if "score" not in value:
        keys = ", ".join(map(repr, value)) or "no keys"
        raise BadAnswer(f'returned a dict without "score" (it has {keys})')
    numbers: dict[str, Any] = {"score": _number("score=", value["score"])}
    for key, entry in value.items():
        if key == "answer":
            numbers[key] = None if entry is None else str(entry)
        elif key != "score" and isinstance(key, str) and isinstance(entry, Real):
            numbers[key] = _number(f"{key}=", entry)
    return numbers


def _number(label: str, value: object) -> float:
    if not isinstance(value, Real):
        raise BadAnswer(f"returned {label}{_shorten(repr(value))} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError as err:
        raise BadAnswer(f"returned {label}a number beyond float") from err
    if not math.isfinite(number):
        raise BadAnswer(f"returned {label}{number}")
    return number


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
