"""Answers of grade-school problems (GSM8K, Cobbe et al. 2021): the final number, compared exactly.

Score range: 0 or 1. `row["answer"]` is the data set's own solution, which ends in "#### 72", or
the bare number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from spmdflow.rewards.format import answer_part, behind_mark, grade, last_box

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    rf"(?:(?<![\w)])[-+])?(?:{_DIGITS}(?:\.\d+)?(?:/{_DIGITS})?|(?<!\d)\.\d+)", re.A
)
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
    """score = accuracy = 1 if the final number equals the row's, else 0; answered: it has one.

    The final number stands after the last ####, else in the last box, else it is the last one of
    the answer; strict: only the first two count. ValueError if the row has no number.
    """
    right = final_number(str(row[column]))
    if right is None:
        raise ValueError(f"got {row[column]!r} as the row's {column!r}, expected a number in it")
    given = final_number(response, strict=strict)
    return grade(None if given is None else str(given), given == right)


def final_number(text: str, *, strict: bool = False) -> Fraction | None:
    """The final number of a text, without units and currency signs; None if it has none."""
    part = answer_part(text)
    said = behind_mark(part)
    if said is None:
        said = last_box(part)
    if said is not None:
        numbers = _find_numbers(said[-1000:].rpartition("=")[2])
        return _read_number(numbers[0]) if numbers else None
    if strict:
        return None
    numbers = _find_numbers(part)
    return _read_number(numbers[-1]) if numbers else None


def _find_numbers(text: str) -> list[str]:
    plain = _FRACTION.sub(r" \1/\2 ", _ORNAMENTS.sub("", text))
    return _NUMBER.findall(plain)


def _read_number(number: str) -> Fraction | None:
    if len(number) > _MAX_LETTERS:
        return None
    above, _, below = number.replace(",", "").partition("/")
    divisor = Fraction(below or 1)
    return Fraction(above) / divisor if divisor else None
