"""Answers of grade-school problems (GSM8K, Cobbe et al. 2021): the final number, compared exactly.

Score range: 0 or 1. `row["answer"]` is the data set's solution, which ends in "#### 72", or only
the number.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from itertools import pairwise
from typing import Any

from spmdflow.rewards.format import answer_part, grade, last_box, text_after_mark

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_MIXED = rf"{_DIGITS}[ \t]+{_DIGITS}/{_DIGITS}"  # 3 1/2
_PLAIN = rf"{_DIGITS}(?:\.\d+)?(?:/{_DIGITS})?|(?<!\d)\.\d+"
_NUMBER = re.compile(rf"(?:(?<![\w)])[-+])?(?:{_MIXED}|{_PLAIN})", re.A)
_MINUS_SIGN = "\u2212"
_LOOSE_SIGN = re.compile(r"^([-+])\s+(?=[\d.])")  # - 7
_OR = re.compile(r"\bor\b", re.IGNORECASE)
_NEAR_OR = re.compile(r"\W*(?:\w+\W+){0,2}?or\W+(?:\w+\W+){0,2}?\W*", re.IGNORECASE)
_LIST = re.compile(r"(?:[\s,;|&/~-]|\band\b|\bto\b|\bvs\b\.?)*", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]{1,40})\}\s*\{([^{}]{1,40})\}")
_ORNAMENTS = re.compile(r"\\[$%,!; ]|[$%*~]|\\text(?:bf|rm)?|\{,\}(?=\d)")
_MAX_LETTERS = 100  # of a number


def score(
    prompt: str,
    response: str,
    row: dict[str, Any],
    *,
    column: str = "answer",
    strict: bool = False,
) -> dict[str, Any]:
    """Return score = accuracy = 1 if the final number equals the row's exactly, otherwise 0.

    answered = 1 if the response has a final number. It follows the last ####, otherwise it is in
    the last box, otherwise it is the last number of the answer. strict: only the first two count.
    Raises ValueError if the row has no number.
    """
    right = final_number(str(row[column]))
    if right is None:
        raise ValueError(f"got {row[column]!r} as the row's {column!r}, expected a number in it")
    number = final_number(response, strict=strict)
    return grade(None if number is None else str(number), number == right)


def final_number(text: str, *, strict: bool = False) -> Fraction | None:
    """Return the final number of a text as an exact fraction; None if it has none.

    It follows the last ####, otherwise it is in the last box, otherwise (unless strict) it is the
    last number of the answer. Units and currency signs are ignored. An answer that names several
    different numbers, such as "42 or 43", has none.
    """
    part = answer_part(text)
    marked = text_after_mark(part)
    if marked is None:
        marked = last_box(part)
    if marked is not None:
        return _marked_number(_strip_ornaments(marked[-1000:].rpartition("=")[2]))
    if strict:
        return None
    return _last_number(_strip_ornaments(part))


def _strip_ornaments(text: str) -> str:
    plain = _ORNAMENTS.sub("", text.replace(_MINUS_SIGN, "-"))
    return _FRACTION.sub(r" \1/\2 ", plain)


def _marked_number(text: str) -> Fraction | None:
    """Return the first number of a marked answer; None if it has none.

    Also None if another value is offered with it: two neighbouring numbers with "or" between them,
    or only separators such as commas and "and".
    """
    text = _LOOSE_SIGN.sub(r"\1", text.strip())
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    first = _read_number(numbers[0][0])
    for before, after in pairwise(numbers):
        between = text[before.end() : after.start()]
        is_offered = _OR.search(between) or _LIST.fullmatch(between)
        if is_offered and _read_number(after[0]) != first:
            return None
    return first


def _last_number(text: str) -> Fraction | None:
    """Return the last number of a text; None if it has none.

    Also None if the number before it differs and at most 100 characters with "or" are between them,
    such as in "42 or maybe 43".
    """
    numbers = deque(_NUMBER.finditer(text), maxlen=2)
    if not numbers:
        return None
    last = _read_number(numbers[-1][0])
    between = text[numbers[0].end() : numbers[-1].start()]
    is_offered = len(between) <= _MAX_LETTERS and _NEAR_OR.fullmatch(between)
    if is_offered and _read_number(numbers[0][0]) != last:
        return None
    return last


def _read_number(number: str) -> Fraction | None:
    """Return the exact value of a number such as 1,000, 3/4, 0.5 or 3 1/2.

    None if it divides by 0 or has more than 100 characters.
    """
    if len(number) > _MAX_LETTERS:
        return None
    integer, *fraction = number.replace(",", "").split()
    if not fraction:
        return _read_fraction(integer)
    part = _read_fraction(fraction[0])
    if part is None:
        return None
    if integer.startswith("-"):
        return Fraction(integer) - part
    return Fraction(integer) + part


def _read_fraction(number: str) -> Fraction | None:
    """The exact value of "3/4" or "0.75"; None for x / 0."""
    above, _, below = number.partition("/")
    divisor = Fraction(below or 1)
    if divisor:
        return Fraction(above) / divisor
    return None
