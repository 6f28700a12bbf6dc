r"""Answers of mathematical problems (MATH, Hendrycks et al. 2021): LaTeX, equal by its meaning.

Score range: 0 or 1. `row["answer"]` is the reference, as LaTeX or as a solution with \boxed{...}.
Needs the extra "math": the library math-verify, which only this file imports, reads both answers
and compares them. The limit uses SIGPROF, which works as worker processes run functions in their
main thread.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from types import FrameType
from typing import Any

from spmdflow.rewards.format import answer_part, behind_mark, grade, last_box

_MAX_LETTERS = 1000  # of an answer
_FRAME = re.compile(r"\\fbox\s*(?=\{)")
_OPEN_BOX = re.compile(r"\\boxed[ \t]+([-+]?\w(?:[\w.,/^]{0,98}\w)?)")  # \boxed 5
_SCIENTIFIC = re.compile(r"\s*([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})\s*", re.ASCII)  # 4e3
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
    r"""score = accuracy = 1 if the final answer equals the row's, else 0; answered: it has one.

    The final answer is in the last box (\boxed{5}, \boxed 5 or \fbox{5}), else after the last ####,
    else (unless strict) the library searches the end of the text. seconds: approximate limit for
    reading and comparing, of a processor's time; answers that take longer count as not equal.
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
    """The final answer as $\\boxed{answer}$; None unless there is one of 1 to 1000 characters."""
    part = _OPEN_BOX.sub(r"\\boxed{\1}", _FRAME.sub(r"\\boxed", answer_part(text)))
    said = last_box(part)
    if said is None:
        said = behind_mark(part)
    if said and len(said) <= _MAX_LETTERS:
        return _put_into_box(said)
    return None


def _put_into_box(answer: str) -> str:
    """An answer in the form that the library is sure to read."""
    scientific = _SCIENTIFIC.fullmatch(answer)
    if scientific:
        answer = rf"{scientific[1]} \cdot 10^{{{scientific[2]}}}"
    return rf"$\boxed{{{answer}}}$"


def _plain(answer: str) -> str:
    """The answer without LaTeX that does not change its meaning, to compare texts first."""
    return _ORNAMENTS.sub("", answer).replace("dfrac", "frac").replace("tfrac", "frac")


def _equal(reference: str, given: str, seconds: int) -> bool:
    from math_verify import grader, parser, verify

    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True  # the limit is ours

    def compare() -> bool:
        pairs = product(_read(reference), _read(given))
        return any(verify(one, other, timeout_seconds=None) for one, other in pairs)

    return _within(seconds, compare)


@lru_cache(maxsize=4096)
def _read(answer: str) -> tuple[Any, ...]:
    """What the library makes of an answer: sympy objects or text; empty if nothing."""
    from math_verify import parse

    return tuple(parse(answer, parsing_timeout=None))


_AGAIN_SECONDS = 0.1


class _TooLong(BaseException):
    """Not an Exception, so that no `except Exception` on the way keeps it."""


def _within(seconds: float, work: Callable[[], bool]) -> bool:
    """work(); False if it takes more of a processor's time: a busy machine changes no answer.

    The signal comes again and again: Python drops what is raised inside of a destructor or of a
    callback of the garbage collector.
    """

    def run() -> bool:
        return work()

    def stop(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not run.__code__:
            frame = frame.f_back
        if frame is not None:  # else the work is over
            raise _TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
    try:
        return run()
    except _TooLong:
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
