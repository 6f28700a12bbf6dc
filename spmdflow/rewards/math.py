r"""Answers of mathematical problems (MATH, Hendrycks et al. 2021): LaTeX, equal by its meaning.

Score range: 0 or 1. `row["answer"]` is the reference, as LaTeX or as a solution with \boxed{...}.
Needs the extra "math": the library math-verify reads both answers and compares them. It stops
itself by SIGALRM, which a worker process of the pool allows: functions run in its main thread.
The only file that imports it.
"""

from __future__ import annotations

import math
import re
import time
from functools import lru_cache
from itertools import product
from typing import Any

from spmdflow.rewards.format import answer_part, behind_mark, grade, last_box

_MAX_LETTERS = 1000  # of an answer
_ORNAMENTS = re.compile(r"\\left|\\right|\\[,!;: ]|\s|^\$+|\$+$|\.$")


def score(
    prompt: str,
    response: str,
    row: dict[str, Any],
    *,
    column: str = "answer",
    strict: bool = False,
    seconds: int = 3,
) -> dict[str, Any]:
    """score = accuracy = 1 if the final answer equals the row's, else 0; answered: it has one.

    The final answer is the last box, or stands behind the last ####; failing both, the library
    searches the end of the text, unless strict. seconds: limit for reading and comparing, within
    a second or two; what takes longer is not equal.
    """
    given = answer_of(response)
    if given is None and not strict:
        given = answer_part(response).strip()[-_MAX_LETTERS:] or None
    if given is None:
        return grade(None, False)
    text = str(row[column])
    reference = answer_of(text) or _put_into_box(text)
    plain = _plain(given)
    return grade(plain, plain == _plain(reference) or _equal(reference, given, seconds))


def answer_of(text: str) -> str | None:
    """The final answer in a box of its own; None without one of 1 to 1000 letters."""
    part = answer_part(text)
    said = last_box(part)
    if said is None:
        said = behind_mark(part)
    return _put_into_box(said) if said and len(said) <= _MAX_LETTERS else None


def _put_into_box(answer: str) -> str:
    """An answer in the form that the library surely reads."""
    return rf"$\boxed{{{answer}}}$"


def _plain(answer: str) -> str:
    """The answer without what does not change it, for the common case of equal text."""
    return _ORNAMENTS.sub("", answer).replace("dfrac", "frac").replace("tfrac", "frac")


def _equal(reference: str, given: str, seconds: int) -> bool:
    from math_verify import verify

    end = time.monotonic() + seconds
    wanted, found = _read(reference, seconds), _read(given, seconds)
    for one, other in product(wanted, found):
        left = math.ceil(end - time.monotonic())
        if left > 0 and verify(one, other, timeout_seconds=left):
            return True
    return False


@lru_cache(maxsize=4096)
def _read(answer: str, seconds: int) -> tuple[Any, ...]:
    """What the library makes of an answer: sympy objects or text; empty if nothing."""
    from math_verify import parse

    return tuple(parse(answer, parsing_timeout=seconds))
