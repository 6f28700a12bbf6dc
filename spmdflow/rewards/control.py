"""Scores that do not depend on whether a response is right: a run with them shows what chance does.

Score range: [0, 1).
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from typing import Any

_SPAN = 2**64


def random_score(
    prompt: str,
    response: str,
    row: dict[str, Any],
    *,
    function: str = "spmdflow.rewards.gsm8k:score",
) -> dict[str, Any]:
    """Return a pseudo-random score, a hash of prompt and response, and the true accuracy.

    The expected score is the same for every response, so that the policy has nothing to learn from
    it. A comparison with another problem's answer is no control: the policy would learn the more
    frequent digits.
    function: "module:function" of a reward whose metrics are reported, without its score.
    """
    true: Callable[..., Any] = _function_of(function)
    measured = true(prompt, response, row)
    metrics = {}
    if isinstance(measured, dict):
        metrics = {name: value for name, value in measured.items() if name != "score"}
        metrics.setdefault("accuracy", measured["score"])
    else:
        metrics["accuracy"] = float(measured)
    return metrics | {"score": hash_score(prompt, response)}


def hash_score(prompt: str, response: str) -> float:
    """A number in [0, 1) that is the same whenever prompt and response are."""
    key = f"{prompt}\n{response.strip()}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") / _SPAN


def _function_of(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
