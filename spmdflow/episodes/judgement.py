"""The judge: a function that scores all episodes of one prompt together. Imports no torch.

    async def judge(episodes, *, base_url, model, api_key) -> list[float | dict | None]

or without async. It runs in the worker processes of the environments. episodes: one dict for each
episode of the prompt, in the order of the rows:

| key | value |
|---|---|
| `row` | what the environment got |
| `score`, `scores` | what it returned: the score, and all numbers; None without a score |
| `failed` | why it failed; "" if it did not |
| `segments` | of each conversation a dict as below, in the order of their last replies |

A conversation has its `name`, `messages` ([] for a completion), `prompt` and `response` as text,
and `num_sampled`, the number of tokens that the policy sampled.

An entry of the result is what an environment returns: a number, a dict with "score" and further
numbers, or None to omit the episode. Entries of episodes without a score are not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.rewards.child import InvalidScore, find_function, scores_of

EPISODES = "episodes"
_SETTING = "actor.rollout.episode.judge"
_FORM = "def judge(episodes, *, base_url, model, api_key), with or without async"


def load_judge(
    name: str, arguments: Mapping[str, Any] | None = None
) -> Callable[..., Awaitable[dict[str, float]]]:
    """Returns the judge of that name as a coroutine function of {"episodes": [...]}.

    Its result is that of `pack_scores`. ConfigError if the judge is missing, or cannot be called
    with episodes, base_url, model, api_key and these arguments.
    """
    function = find_function(name, _SETTING)
    own = dict(arguments or {})
    try:
        inspect.signature(function).bind([], base_url="", model="", api_key="", **own)
    except TypeError as err:
        got = f"{name!r} with the parameters {inspect.signature(function)}"
        raise ConfigError.of(_SETTING, got, _FORM, f"use these parameters ({err})") from err

    async def judge(row: Mapping[str, Any], **endpoint: str) -> dict[str, float]:
        episodes = row[EPISODES]
        values = function(episodes, **endpoint, **own)
        if inspect.isawaitable(values):
            values = await values
        return pack_scores(values, len(episodes))

    return judge


def pack_scores(values: object, count: int) -> dict[str, float]:
    """Returns what a judge returned as one dict of numbers, with keys "INDEX:NAME".

    An entry that is None has no key. InvalidScore unless values is a list with `count` entries,
    each a finite number, a dict with a finite "score", or None. "score" itself is 0: the form of an
    environment's result asks for it.
    """
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InvalidScore(f"returned {type(values).__name__}, no list of {count} scores")
    if len(values) != count:
        raise InvalidScore(f"returned {len(values)} scores for {count} episodes")
    packed = {"score": 0.0}
    for index, value in enumerate(values):
        if value is None:
            continue
        for key, number in scores_of(value).items():
            if key != "answer":
                packed[f"{index}:{key}"] = number
    return packed


def unpack_scores(packed: Mapping[str, float], count: int) -> list[dict[str, float] | None]:
    """Returns the scores of each episode from the dict of `pack_scores`; None: it is omitted."""
    result: list[dict[str, float] | None] = [None] * count
    for key, number in packed.items():
        index, colon, name = key.partition(":")
        if not colon:
            continue
        scores = result[int(index)] or {}
        result[int(index)] = scores | {name: number}
    return result
