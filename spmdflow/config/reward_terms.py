"""What `reward.function` says, as terms: one function, or a map of weighted ones. Text only.

    function: my_reward.py:score                     one function: its result is the score
    function:                                        a map: the score is the weighted sum
      correct: spmdflow.rewards.gsm8k:score
      format: 0.2 * spmdflow.rewards.format:think_answer
      length: 0.1 * spmdflow.rewards.length:linear(free_tokens=200, max_tokens=400)
      judge: 0.5 * model                             the score of reward.model

The name of a term is that of its metric. A weight of 0 only reports; null takes a term away.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmdflow.errors import ConfigError

MODEL = "model"
RESERVED = ("answer", "dropped", "dropped_share", "errors", "mean", "overlong", "score")
"""Names that metrics of a reward have already."""

_TERM = re.compile(r"(?:([^*]*?)\s*\*\s*)?(model|.+?:[\w.]+)\s*(\(.*\))?", re.DOTALL)
_FORMS = (
    "expected file.py:name, module:name or model, with a weight in front and name=value behind "
    "where wanted; write for example 0.2 * my_reward.py:score(limit=100)"
)


@dataclass(frozen=True)
class RewardTerm:
    """One summand of the score: weight * function(prompt, response, row, **arguments)."""

    name: str
    """Name of its metric; "" for a function that stands alone."""
    function: str
    """file.py:name or module:name; "model" for the score of reward.model."""
    weight: float = 1.0
    arguments: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments: numbers, texts, booleans, None and lists of them."""

    @property
    def is_model(self) -> bool:
        """Whether it is the score of reward.model."""
        return self.function == MODEL


def reward_terms(key: str, setting: object) -> tuple[RewardTerm, ...]:
    """The terms of a `function` setting, in its order; none of None. ConfigError if unreadable."""
    if setting is None:
        return ()
    if isinstance(setting, str):
        return (_term(key, "", setting),)
    if not isinstance(setting, dict):
        raise ConfigError(
            f"{key}: got {setting!r} ({type(setting).__name__}), expected one function or a map "
            f"name -> function; write file.py:name or {{correct: file.py:name, ...}}"
        )
    written = {name: text for name, text in setting.items() if text is not None}
    for name in written:
        _check_name(key, name)
    return tuple(_term(f"{key}.{name}", name, text) for name, text in written.items())


def knows_right(reward: Any) -> bool:
    """Whether reward settings have a function, which can say that a response is right."""
    return any(not term.is_model for term in reward_terms("reward.function", reward.function))


def with_located_files(setting: object, locate: Callable[[str], str]) -> object:
    """The setting with the path of every file.py:name replaced by locate(path)."""
    if isinstance(setting, dict):
        return {name: with_located_files(text, locate) for name, text in setting.items()}
    match = _TERM.fullmatch(setting.strip()) if isinstance(setting, str) else None
    if match is None or ".py:" not in match[2]:
        return setting
    text = match.string
    file, _, name = match[2].rpartition(":")
    return f"{text[: match.start(2)]}{locate(file)}:{name}{text[match.end(2) :]}"


def _check_name(key: str, name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
        raise ConfigError(
            f"{key}: got the term {name!r}, expected a name of letters, digits and _ that is none "
            f"of {', '.join(RESERVED)}; rename it"
        )


def _term(key: str, name: str, text: object) -> RewardTerm:
    match = _TERM.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{key}: got {text!r}, {_FORMS}")
    weight, function, call = match.groups()
    if function == MODEL and call:
        raise ConfigError(
            f"{key}: got {text!r}, but a model takes no arguments; expected model alone; "
            f"write {key}=model"
        )
    return RewardTerm(name, function, _weight(key, weight), _arguments(key, call))


def _weight(key: str, text: str | None) -> float:
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ConfigError(
            f"{key}: got the weight {text!r}, expected a finite number; write 0.5 * file.py:name"
        )
    return weight


def _arguments(key: str, call: str | None) -> tuple[tuple[str, Any], ...]:
    """The keyword arguments of "(name=value, ...)", values being literals that JSON keeps."""
    try:
        tree = ast.parse(f"f{call or '()'}", mode="eval").body
        assert isinstance(tree, ast.Call)
        found = {str(item.arg): ast.literal_eval(item.value) for item in tree.keywords}
        fits = not tree.args and None not in [item.arg for item in tree.keywords]
        fits = fits and json.loads(json.dumps(found, allow_nan=False)) == found
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, AssertionError):
        fits = False
    if not fits:
        raise ConfigError(
            f"{key}: got the arguments {call}, expected name=value with numbers, texts in quotes, "
            f"True, False or None; write for example (limit=100, kind='soft')"
        )
    return tuple(found.items())
