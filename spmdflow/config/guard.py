"""run.guards: conditions on the metrics of a step, and what is done when one holds. Text only.

    NAME < LIMIT: ACTION    NAME > LIMIT: ACTION

LIMIT is a number, or [FACTOR *] best [+- NUMBER], or the same of median: the best value before
this step (with < the largest, with > the smallest), or the median of the values before it.
ACTION is warn, stop or skip (docs/TROUBLESHOOTING.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from spmdflow.errors import ConfigError

WARN = "warn"
STOP = "stop"
SKIP = "skip"
DEFAULT_GUARDS = [
    "eval/accuracy < 0.25 * best - 0.1: stop",
    "reward/mean < 0.1 * median: warn",
    "actor/reference_kl > 10: stop",
    "actor/approx_kl > 10: stop",
    "actor/entropy < 0.001: warn",
    "rollout/drift > 1: stop",
    "perf/host_growth > 1.5: warn",
]
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_GUARD = re.compile(
    rf"(?P<name>[^\s<>:]+)\s*(?P<sign>[<>])\s*"
    rf"(?:(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<base>best|median)\s*(?P<more>[+-]\s*{_NUMBER})?"
    rf"|(?P<number>[+-]?{_NUMBER}))\s*:\s*(?P<action>{WARN}|{STOP}|{SKIP})"
)
_LATE = ("eval/", "time/", "perf/", "transfer/", "controller/")


@dataclass(frozen=True)
class Guard:
    """One condition: value > factor * base + more, or <; base None: more alone."""

    text: str
    name: str
    is_above: bool
    """Whether values above the limit trip it; else those below."""
    base: str | None
    """best or median of earlier values."""
    factor: float
    more: float
    action: str

    def limit(self, base: float) -> float:
        """The limit, from the best or median value (0 without one)."""
        return self.factor * base + self.more

    def exceeds(self, value: float, limit: float) -> bool:
        """Whether a value is on the wrong side; nan and infinity always are."""
        return not abs(value) < float("inf") or (value > limit if self.is_above else value < limit)


def guard_of(text: str | Mapping[str, str], key: str = "run.guards") -> Guard:
    """Parse a guard such as "actor/kl > 10: stop", also as the map that YAML reads without quotes.

    A plain number as limit gives base None and factor 0. ConfigError for any other form, and for
    the action skip on a metric that is known only after the update (eval/, time/, perf/, transfer/,
    controller/).
    """
    if isinstance(text, Mapping):
        text = ", ".join(f"{name}: {action}" for name, action in text.items())
    match = _GUARD.fullmatch(str(text).strip())
    if match is None:
        expected = "NAME < LIMIT: ACTION, or with >; LIMIT a number or such as 0.5 * best - 0.1, "
        expected += "or of the median; ACTION warn, stop or skip"
        do = f"""write {key}='["eval/accuracy < 0.5 * best: stop"]'"""
        raise ConfigError.of(key, repr(text), expected, do)
    if match["action"] == SKIP and match["name"].startswith(_LATE):
        expected = "skip only for what is known before the update, such as reward/mean"
        raise ConfigError.of(key, repr(text), expected, "write warn or stop")
    more = match["number"] or (match["more"] or "0").replace(" ", "")
    factor = float(match["factor"] or 1) if match["base"] else 0.0
    is_above = match["sign"] == ">"
    return Guard(
        text.strip(), match["name"], is_above, match["base"], factor, float(more), match["action"]
    )
