"""Countdown: make a number from some others with + - * / and brackets, each used once at most.

Score range: 0 to 1. `row["numbers"]` and `row["target"]` are the problem. An expression is read by
a grammar of its own, in exact fractions: nothing of a response is ever evaluated as Python.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from spmdflow.rewards.format import answer_part, last_box

_MAX_LETTERS = 200  # of an expression: deeper nesting than that no answer needs
_TOKEN = re.compile(r"\s*(?:(\d{1,9})|([-+*/()]))", re.A)
_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "[": "(", "]": ")"})
_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": ""}
_LINE = re.compile(r"[-+*/()\d\s=]*\d[-+*/()\d\s=]*", re.A)


class _NotReadable(ValueError):
    """No expression of the grammar."""


def score(
    prompt: str,
    response: str,
    row: dict[str, Any],
    *,
    use_all: bool = True,
    attempt: float = 0.1,
) -> dict[str, Any]:
    """1 if the answer's expression gives the target from the numbers, each used exactly once.

    attempt (0 to 1): the score of an expression with the right numbers and another value; 0 for
    anything else. use_all=False: numbers may be left over. accuracy is 1 or 0.
    """
    found = expression_of(response)
    if found is None:
        return {"score": 0.0, "accuracy": 0.0, "answered": 0.0, "answer": None}
    value, used = found
    allowed = Counter(map(int, row["numbers"]))
    fits = Counter(used) == allowed if use_all else Counter(used) <= allowed
    correct = float(fits and value == Fraction(row["target"]))
    earned = correct or float(fits) * attempt
    return {"score": earned, "accuracy": correct, "answered": 1.0, "answer": f"{value}, {fits}"}


def expression_of(response: str) -> tuple[Fraction | None, list[int]] | None:
    """(value, numbers used) of the answer's expression; None without one, value None for x / 0.

    It stands between <answer> tags, in the last box or alone on the last line that has nothing
    else; what follows an = is not looked at.
    """
    part = answer_part(response)
    text = last_box(part)
    if text is None:
        text = part if "</answer>" in response else _last_line(part)
    if text is None or len(text) > _MAX_LETTERS:
        return None
    try:
        return evaluate(text)
    except _NotReadable:
        return None


def evaluate(text: str) -> tuple[Fraction | None, list[int]]:
    """(value, numbers in order) of "(5 * 22) - 27"; ValueError if it is no such expression."""
    for name, sign in _LATEX.items():
        text = text.replace(name, sign)
    tokens = _tokens(text.translate(_SIGNS).partition("=")[0].strip(" $\n\t."))
    value, end = _sum(tokens, 0)
    if end != len(tokens):
        raise _NotReadable(tokens[end])
    return value, [int(token) for token in tokens if token.isdigit()]


def _last_line(text: str) -> str | None:
    """The last line that holds an expression and nothing else."""
    lines = (line.translate(_SIGNS) for line in reversed(text[-20_000:].splitlines()))
    return next((line for line in lines if _LINE.fullmatch(line)), None)


def _tokens(text: str) -> list[str]:
    tokens, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _NotReadable(text[place:])
        tokens.append(match[1] or match[2])
        place = match.end()
    return tokens


def _sum(tokens: Sequence[str], place: int) -> tuple[Fraction | None, int]:
    """product (("+" | "-") product)*: its value and where it ends."""
    value, place = _product(tokens, place)
    while place < len(tokens) and tokens[place] in "+-":
        sign, (other, place) = tokens[place], _product(tokens, place + 1)
        if value is not None and other is not None:
            value = value + other if sign == "+" else value - other
        else:
            value = None
    return value, place


def _product(tokens: Sequence[str], place: int) -> tuple[Fraction | None, int]:
    """factor (("*" | "/") factor)*."""
    value, place = _factor(tokens, place)
    while place < len(tokens) and tokens[place] in "*/":
        sign, (other, place) = tokens[place], _factor(tokens, place + 1)
        if value is None or other is None or (sign == "/" and not other):
            value = None
        else:
            value = value * other if sign == "*" else value / other
    return value, place


def _factor(tokens: Sequence[str], place: int) -> tuple[Fraction | None, int]:
    """number | "-" factor | "(" sum ")"."""
    if place == len(tokens):
        raise _NotReadable("ends early")
    token = tokens[place]
    if token.isdigit():
        return Fraction(token), place + 1
    if token == "-":
        value, place = _factor(tokens, place + 1)
        return None if value is None else -value, place
    if token != "(":
        raise _NotReadable(token)
    value, place = _sum(tokens, place + 1)
    if place == len(tokens) or tokens[place] != ")":
        raise _NotReadable("a bracket stays open")
    return value, place + 1
