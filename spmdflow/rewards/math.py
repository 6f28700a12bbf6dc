r"""Answers of mathematical problems (MATH, Hendrycks et al. 2021): LaTeX, compared by its meaning.

Score range: 0 or 1. `row["answer"]` is the reference, as LaTeX or as a solution with \boxed{...}.
Needs the extra "math": the library math-verify, which only this file imports, parses and compares
both answers. The time limit uses SIGPROF, which works because worker processes run functions in
their main thread.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from types import FrameType
from typing import Any

from spmdflow.rewards.format import answer_part, grade, last_box, text_after_mark

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
    r"""Return score = accuracy = 1 if the final answer equals the row's in meaning, otherwise 0.

    answered = 1 if the response has a final answer. It is in the last box (\boxed{5}, \boxed 5 or
    \fbox{5}), otherwise after the last ####, otherwise (unless strict) the library searches the end
    of the text. seconds: approximate limit of CPU time for parsing and comparing; answers that take
    longer count as not equal.
    """
    answer = answer_of(response)
    if answer is None and not strict:
        answer = answer_part(response).strip()[-_MAX_LETTERS:] or None
    if answer is None:
        return grade(None, False)
    text = str(row[column])
    reference = answer_of(text) or _put_into_box(text)
    plain = _strip_ornaments(answer)
    return grade(
        plain, plain == _strip_ornaments(reference) or _is_equal(reference, answer, seconds)
    )


def answer_of(text: str) -> str | None:
    r"""Return the final answer as "$\boxed{answer}$": of the last box, otherwise after ####.

    None if there is none, it is empty or it has more than 1000 characters.
    """
    part = _OPEN_BOX.sub(r"\\boxed{\1}", _FRAME.sub(r"\\boxed", answer_part(text)))
    marked = last_box(part)
    if marked is None:
        marked = text_after_mark(part)
    if marked and len(marked) <= _MAX_LETTERS:
        return _put_into_box(marked)
    return None


def _put_into_box(answer: str) -> str:
    r"""Return "$\boxed{answer}$", a form that the library always parses.

    A number such as 4e3 becomes 4 \cdot 10^{3} in it.
    """
    scientific = _SCIENTIFIC.fullmatch(answer)
    if scientific:
        answer = rf"{scientific[1]} \cdot 10^{{{scientific[2]}}}"
    return rf"$\boxed{{{answer}}}$"


def _strip_ornaments(answer: str) -> str:
    """The answer without LaTeX that does not change its meaning, to compare texts directly."""
    return _ORNAMENTS.sub("", answer).replace("dfrac", "frac").replace("tfrac", "frac")


def _is_equal(reference: str, answer: str, seconds: int) -> bool:
    """Return whether the library finds both answers equal; False after `seconds` of CPU time.

    It may parse a text in several ways; one pair that is equal suffices.
    """
    from math_verify import grader, parser, verify

    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True  # the limit is ours

    def compare() -> bool:
        pairs = product(_read(reference), _read(answer))
        return any(verify(one, other, timeout_seconds=None) for one, other in pairs)

    return _run_with_limit(seconds, compare)


@lru_cache(maxsize=4096)
def _read(answer: str) -> tuple[Any, ...]:
    """The library's parse of an answer: sympy objects or text; empty if it cannot parse it."""
    from math_verify import parse

    return tuple(parse(answer, parsing_timeout=None))


_AGAIN_SECONDS = 0.1


class _TimeLimitReached(BaseException):
    """Not an Exception, so that no `except Exception` of the library swallows it."""


def _run_with_limit(seconds: float, work: Callable[[], bool]) -> bool:
    """Return work(); False if it takes more than `seconds` of CPU time of this process.

    So other load on the node changes no result. Uses SIGPROF, only in the main thread, and restores
    its handler. The signal is repeated, because Python drops exceptions that are raised inside a
    destructor or a callback of the garbage collector.
    """

    def run() -> bool:
        return work()

    def stop(number: int, frame: FrameType | None) -> None:
        """Handle SIGPROF: raise _TimeLimitReached if the interrupted stack contains `run`."""
        while frame is not None and frame.f_code is not run.__code__:
            frame = frame.f_back
        if frame is not None:  # otherwise the work is over
            raise _TimeLimitReached

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
    try:
        return run()
    except _TimeLimitReached:
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
