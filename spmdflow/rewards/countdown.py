"""Countdown: reach a target from given numbers with + - * / and brackets, each used at most once.

Score range: 0 to 1. `row["numbers"]` and `row["target"]` are the problem. Python's parser reads an
expression, which is then evaluated in exact fractions. Only numbers and + - * / are accepted, and
no part of a response is ever executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from spmdflow.rewards.format import answer_part, grade, last_box

_MAX_LETTERS = 200  # of an expression: limits nesting; no answer needs more
_LETTERS = re.compile(r"(?:[-+*/()\s]|(?<!\d)\d{1,9}(?!\d))*", re.A)
_LEADING_ZEROS = re.compile(r"\b0+(?=\d)")
_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "[": "(", "]": ")"})
_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": ""}
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.USub, *_OPERATORS)
_LINE = re.compile(r"[-+*/()\d\s=]*\d[-+*/()\d\s=]*", re.A)


def score(
    prompt: str,
    response: str,
    row: dict[str, Any],
    *,
    use_all: bool = True,
    attempt: float = 0.1,
) -> dict[str, Any]:
    """Score 1 if the answer's expression gives the target from the numbers, each used exactly once.

    attempt (0 to 1): the score of an expression with the right numbers but another value. Anything
    else scores 0. use_all=False: numbers may remain unused. accuracy is 1 or 0.
    """
    expression = expression_of(response)
    if expression is None:
        return grade(None, False)
    value, used = expression
    allowed = Counter(map(int, row["numbers"]))
    fits = Counter(used) == allowed if use_all else Counter(used) <= allowed
    is_right = fits and value == Fraction(row["target"])
    return grade(f"{value}, {fits}", is_right, score=float(is_right) or float(fits) * attempt)


def expression_of(response: str) -> tuple[Fraction | None, list[int]] | None:
    """Return (value, numbers used) of the answer's expression; the value is None for x / 0.

    None if there is no expression, or one of more than 200 characters. It is in the last box,
    otherwise between <answer> tags, otherwise on the last line that consists of an expression only.
    Text after an = is ignored.
    """
    part = answer_part(response)
    text = last_box(part)
    if text is None:
        text = part if "</answer>" in response else _last_line(part)
    if text is None or len(text) > _MAX_LETTERS:
        return None
    try:
        return evaluate(text)
    except (ValueError, SyntaxError):
        return None


def evaluate(text: str) -> tuple[Fraction | None, list[int]]:
    """Return (value, numbers in order) of an expression such as "(5 * 22) - 27".

    The value is an exact fraction; None if it divides by 0. Also reads LaTeX's operators, Unicode's
    signs and square brackets; ignores what follows an =. Raises ValueError or SyntaxError if the
    text is not such an expression.
    """
    for name, sign in _LATEX.items():
        text = text.replace(name, sign)
    text = text.translate(_SIGNS).partition("=")[0].strip(" $\n\t.")
    if _LETTERS.fullmatch(text) is None:
        raise ValueError(f"got {text!r}, expected numbers of up to 9 digits, + - * / and brackets")
    plain = _LEADING_ZEROS.sub("", " ".join(text.split()))
    tree = ast.parse(plain, mode="eval")
    if not all(isinstance(node, _NODES) for node in ast.walk(tree)):
        raise ValueError(f"got {text!r}, expected nothing but + - * / between numbers")
    try:
        value = _evaluate(tree.body)
    except ZeroDivisionError:
        value = None
    return value, [int(number) for number in re.findall(r"\d+", plain)]


def _evaluate(node: ast.expr) -> Fraction:
    """The exact value of a parsed expression; ZeroDivisionError for x / 0."""
    if isinstance(node, ast.UnaryOp):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    assert isinstance(node, ast.Constant), node
    return Fraction(str(node.value))


def _last_line(text: str) -> str | None:
    """The last line that consists of an expression only; None without one."""
    lines = (line.translate(_SIGNS) for line in reversed(text[-20_000:].splitlines()))
    return next((line for line in lines if _LINE.fullmatch(line)), None)
