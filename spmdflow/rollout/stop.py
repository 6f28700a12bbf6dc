"""Stop strings of a call, as both generators look for them: in the text, after each token."""

from __future__ import annotations

from spmdflow.datasets.tokenizer import StopStrings, load_tokenizer
from spmdflow.rollout.sampling import Sampling


def stop_strings_of(sampling: Sampling) -> StopStrings | None:
    """What ends responses before their end token; None: nothing does."""
    if not sampling.stop:
        return None
    return StopStrings(load_tokenizer(sampling.tokenizer_path), sampling.stop)
