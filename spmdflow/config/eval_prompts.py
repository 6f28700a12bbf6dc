"""How much an evaluation takes, as users write it: "all", "512" or "512 x 8 samples". Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from spmdflow.errors import ConfigError

_FORM = re.compile(r"(?P<prompts>all|[1-9]\d*)(?: x (?P<samples>[1-9]\d*) samples?)?")


class EvalPrompts(NamedTuple):
    """Held-out prompts of one evaluation."""

    num_prompts: int | None
    """The first so many; none: all."""
    num_samples: int
    """Responses sampled for each besides the greedy one; 0: none, so no pass@k."""


def eval_prompts_of(text: str, key: str = "data.eval_prompts") -> EvalPrompts:
    """What the text asks for; ConfigError for anything else. key: of the setting, for messages."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{key}: got {text!r}, expected all or a number of prompts, and how many samples of "
            f"each pass@k takes, if any; write all, 512 or '512 x 8 samples'"
        )
    prompts = None if match["prompts"] == "all" else int(match["prompts"])
    return EvalPrompts(prompts, int(match["samples"] or 0))
