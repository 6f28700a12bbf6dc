"""SmolLM2-135M-Instruct, a real model with a real vocabulary and a real template: where it is.

Also prompts of any exact length in its vocabulary, and transformers' log-probabilities.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

REPOSITORY = Path(__file__).parents[1]
_IN_REPOSITORY = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
SMOLLM2 = Path(os.environ.get("SPMDFLOW_SMOLLM2", _IN_REPOSITORY))
IS_HERE = (SMOLLM2 / "config.json").is_file()
REASON = (
    f"no SmolLM2-135M-Instruct in {SMOLLM2}: put its Hugging Face folder there, or name another "
    f"one with the variable SPMDFLOW_SMOLLM2"
)
END = 2
"""<|im_end|>: ends a turn and a response, and is the padding too."""

needs_smollm2 = pytest.mark.skipif(not IS_HERE, reason=REASON)


def words_of(tokenizer: Any, count: int, *, seed: int = 0) -> str:
    """A text of exactly `count` tokens: words of the vocabulary with a blank before them."""
    words = []
    for token in sorted(tokenizer.get_vocab()):
        if re.fullmatch("\u0120[a-z]+", token):
            words.append(f" {token[1:]}")
    return "".join(random.Random(seed).choices(words, k=count))


def model_of_transformers() -> Any:
    """The model in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2, dtype=torch.float32, local_files_only=True
    ).eval()


@torch.no_grad()
def plain_logits(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Logits (R, V) that predict each response token: one forward over the row, no cache."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(response) + 1).logits[0]
    return logits[:-1]
