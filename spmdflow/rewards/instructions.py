"""Whether a text follows the conditions of its prompt: its length, a word in it, its form.

Each function scores 0 or 1 and is meant as one term of a sum, with a weight of its own:

    reward:
      function:
        length: 0.3 * spmdflow.rewards.instructions:length
        word: 0.3 * spmdflow.rewards.instructions:word
        form: 0.4 * spmdflow.rewards.instructions:form

scripts/make_problems.py writes such prompts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_FEWEST_WORDS = 3
"""A shorter text follows no condition: otherwise the required word alone would be the best one."""


def length(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the response has 3 to row["max_words"] words, otherwise 0."""
    return float(_FEWEST_WORDS <= len(_words_of(response)) <= int(row["max_words"]))


def word(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if row["word"] is a word of the response, of 3 words or more, in any case."""
    words = _words_of(response)
    return float(len(words) >= _FEWEST_WORDS and str(row["word"]).lower() in words)


def form(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the response, of 3 words or more, has the form row["form"], otherwise 0.

    Forms: capitals (no lower-case letter), question (ends with a question mark), list (every line
    that is not blank starts with "- "), quotes (begins and ends with a double quotation mark).
    ValueError for another form.
    """
    name = str(row["form"])
    if name not in _FORMS:
        raise ValueError(f"got form {name!r}, expected one of {', '.join(_FORMS)}")
    text = response.strip()
    if len(_words_of(text)) < _FEWEST_WORDS:
        return 0.0
    return float(_FORMS[name](text))


def weighted_sum(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 0.3 length + 0.3 word + 0.4 form, the sum above, as one number."""
    return (
        0.3 * length(prompt, response, row)
        + 0.3 * word(prompt, response, row)
        + 0.4 * form(prompt, response, row)
    )


def _words_of(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return _WORD.findall(text.lower())


def _is_list(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return all(line.lstrip().startswith("- ") for line in lines)


_FORMS: dict[str, Callable[[str], bool]] = {
    "capitals": str.isupper,
    "question": lambda text: text.endswith("?"),
    "list": _is_list,
    "quotes": lambda text: text[0] == text[-1] == '"',
}
