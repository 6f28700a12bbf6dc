"""What happens to a sample whose reward function fails, as users write it. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from spmdflow.errors import ConfigError

DROPPED_PERCENT = 10.0
"""Failed rows of one call that a run with "drop" bears, unless the setting says otherwise."""
_FORM = re.compile(r"raise|zero|drop(?: (?P<percent>\d{1,3}(?:\.\d+)?) ?%)?")


class OnError(NamedTuple):
    """The setting reward.on_error, taken apart."""

    kind: str
    """raise, zero or drop."""
    max_dropped_percent: float
    """Of the rows of one call, over all ranks; more failed ones end the run (drop)."""


def on_error_of(text: str, key: str = "reward.on_error") -> OnError:
    """What the text asks for; ConfigError for anything else. key: of the setting, for messages."""
    match = _FORM.fullmatch(text.strip())
    percent = float(match["percent"] or DROPPED_PERCENT) if match else 101.0
    if match is None or percent > 100:
        raise ConfigError(
            f"{key}: got {text!r}, expected raise, zero, drop, or drop with the share of failed "
            f"rows that ends the run (10% if left out); write for example {key}='drop 25%'"
        )
    return OnError(match[0].split()[0], percent)
