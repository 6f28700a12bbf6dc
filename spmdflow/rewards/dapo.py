r"""DAPO's own scorer of mathematical answers (Yu et al. 2025): 1 or -1, equal as normalised texts.

The answer follows the last "Answer:" in the response's last 300 characters. Without one it is in
the last complete \boxed{...} of the last 100, which must equal the reference character by
character. Texts are normalised like Minerva's (Lewkowycz et al. 2022, appendix D.1). Answers that
are only equal in meaning, such as 1/2 and 0.5, are not equal here; `math` compares these.
"""

from __future__ import annotations

import re
from typing import Any

from spmdflow.rewards.format import grade, last_box

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_LETTERS = 300
_BOX_LETTERS = 100
_REPLACED = [
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", "")),
    *(("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
]
_REMOVED = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s} "
    "\\text{.}"
).split() + ["\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}"]
_REMOVED += ["^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"]
_PATTERNS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r".*?\$(.*?)\$.*", r"$\1$"),  # the text between dollar signs
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),  # \frac12
        (r"sqrt([^{])", r"sqrt{\1}"),
        (r"\$", ""),
    )
]


def score(
    prompt: str, response: str, row: dict[str, Any], *, column: str = "answer"
) -> dict[str, Any]:
    r"""Return score = 1 if the answer equals the row's, otherwise -1; accuracy = 1 or 0.

    The answer follows the last "Answer:" in the response's last 300 characters, and is compared
    after `normalise` of both. Otherwise it is in the last \boxed{...} of the last 100 characters,
    and must equal row[column] exactly. answered = 1 if the response has an answer.
    """
    reference = str(row[column])
    end = response[-_LETTERS:]
    answers = _ANSWER.findall(end)
    if answers:
        answer: str | None = normalise(answers[-1])
        right = normalise(reference)
    else:
        box = end[-_BOX_LETTERS:]
        answer = last_box(box[max(box.rfind("\\boxed{"), 0) :])
        right = reference
    is_right = answer == right
    return grade(answer, is_right, score=1.0 if is_right else -1.0)


def normalise(answer: str) -> str:
    """Return the text after the last =, without units, articles, spaces and purely visual LaTeX.

    Of text with dollar signs, only that between the first two stays. Commas are removed if only
    digits and commas are left.
    """
    answer = answer.rpartition("=")[2]
    for before, after in [*_REPLACED, *((word, "") for word in _REMOVED)]:
        answer = answer.replace(before, after)
    for pattern, replacement in _PATTERNS:
        answer = pattern.sub(replacement, answer)
    plain = answer.replace(",", "")
    return (plain if plain.isdigit() else answer).strip()
