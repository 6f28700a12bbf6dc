"""Sentiment of a text from a lexicon of word valences (after Hutto and Gilbert 2014, VADER).

Score range: -1 to 1. No column of the row is read. Simpler than the published rules: no capitals,
idioms, emoticons or "but". docs/REWARDS.md reports how well it agrees with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
_NEGATIONS = frozenset("no not never none nobody nothing nor neither cannot without".split())
_STRONGER = frozenset("very really so extremely totally absolutely incredibly".split())
_WEAKER = frozenset("slightly somewhat barely hardly almost kinda partly".split())
_NEGATED = -0.74
_BOOST = 0.293
_EXCLAMATION = 0.292
_HALFWAY = 15.0  # squared sum of valences at which the score is 1 / sqrt(2)


def score(
    prompt: str, response: str, row: dict[str, Any], *, lexicon_path: str, with_prompt: bool = False
) -> float:
    """The lexicon score of the response, or of prompt and response as one text."""
    text = prompt + response if with_prompt else response
    return lexicon_score(text, _lexicon(lexicon_path))


@cache
def _lexicon(path: str) -> dict[str, float]:
    return load_lexicon(Path(path))


def load_lexicon(path: Path) -> dict[str, float]:
    """Return word -> valence (-4 to 4) from a tab-separated file.

    The first two columns are read. Lines with one column are skipped; a later line of a word wins.
    """
    fields = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    lexicon = {}
    for field in fields:
        if len(field) > 1:
            lexicon[field[0]] = float(field[1])
    return lexicon


def lexicon_score(text: str, lexicon: Mapping[str, float]) -> float:
    """Return the sentiment of a text in (-1, 1): s / sqrt(s^2 + 15).

    s is the sum of the words' valences (`_valence`); up to four "!" each move it 0.292 further from
    0. A text without known words scores 0. Case does not matter.
    """
    words = _WORD.findall(text.lower())
    total = sum(_valence(words, index, lexicon) for index in range(len(words)))
    if total:
        total += (1 if total > 0 else -1) * _EXCLAMATION * min(text.count("!"), 4)
    return total / sqrt(total * total + _HALFWAY)


def _valence(words: list[str], index: int, lexicon: Mapping[str, float]) -> float:
    """Return the valence of the word at `index` in its context; 0 if it is not in the lexicon.

    An intensifier directly before it adds 0.293 away from 0 ("very") or towards it ("barely"). A
    negation among the three words before it multiplies the result by -0.74.
    """
    valence = lexicon.get(words[index], 0.0)
    if not valence:
        return 0.0
    sign = 1 if valence > 0 else -1
    before = words[max(0, index - 3) : index]
    if before and before[-1] in _STRONGER:
        valence += sign * _BOOST
    if before and before[-1] in _WEAKER:
        valence -= sign * _BOOST
    negated = any(word in _NEGATIONS or word.endswith("n't") for word in before)
    if negated:
        return valence * _NEGATED
    return valence
