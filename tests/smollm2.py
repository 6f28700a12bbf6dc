"""SmolLM2-135M-Instruct, a real model with a real vocabulary and a real template: where it is.

Also prompts of any exact length in its vocabulary, and transformers' log-probabilities, in a file
that the ranks of a program read.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ragged_from_rows, rows_of

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


def plain_log_probs(model: Any, rows: TensorDict) -> list[Tensor]:
    """Of each response token, by transformers, one row at a time."""
    found = []
    pairs = zip(rows_of(rows["prompts"]), rows_of(rows["responses"]), strict=True)
    for prompt, response in pairs:
        logits = plain_logits(model, prompt.tolist(), response.tolist())
        found.append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
    return found


def write_scored(rows: TensorDict, path: Path) -> None:
    """A file of prompts, responses and transformers' log-probability of each response token."""
    columns = {
        "log_probs": [row.tolist() for row in plain_log_probs(model_of_transformers(), rows)]
    }
    for name in ("prompts", "responses"):
        columns[name] = [row.tolist() for row in rows_of(rows[name])]
    path.write_text(json.dumps(columns))


def read_scored(path: Path) -> TensorDict:
    """The rows that `write_scored` wrote."""
    columns = {}
    for name, rows in json.loads(path.read_text()).items():
        columns[name] = ragged_from_rows([torch.tensor(row) for row in rows])
    return TensorDict(columns, batch_size=[len(rows)])
