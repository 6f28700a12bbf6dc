"""The trainer's log-probabilities with SmolLM2's weights, against plain transformers in float32.

One rank, prompts of 1 to 4,000 tokens, and responses whose last token is the padding too. Sums in
another order through 30 layers differ by less than 1e-4. `test_real_logprobs.py` has every engine
and layout.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from spmdflow.config.schema import DataConfig
from spmdflow.data.ragged import lengths_of, ragged_from_rows
from spmdflow.datasets.scan import PromptSource, scan
from spmdflow.datasets.tokenizer import load_tokenizer
from tests.forked import torchrun
from tests.smollm2 import END, SMOLLM2, needs_smollm2, words_of, write_scored

pytestmark = [needs_smollm2, pytest.mark.drill]

PROGRAM = Path(__file__).parent / "programs" / "smollm2_engine.py"
TOLERANCE = 1e-4
RESPONSE = 6
"""Tokens of a response before its end."""


def rows_with_prompts(folder: Path, sizes: list[int]) -> TensorDict:
    """Prompts of these sizes, each with a response that ends with the end of a turn.

    The prompts are read from a file by the functions of a run.
    """
    tokenizer = load_tokenizer(str(SMOLLM2))
    path = folder / "prompts.jsonl"
    texts = [words_of(tokenizer, size, seed=number) for number, size in enumerate(sizes)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    cfg = DataConfig(
        train_path=str(path), tokenizer_path=str(SMOLLM2), max_prompt_tokens=max(sizes)
    )
    report = scan(cfg, cfg.train_path, tokenizer)
    prompts = PromptSource(report.files, cfg).read_rows(report.rows.tolist())["prompts"]
    responses = []
    for number in range(len(sizes)):
        words = words_of(tokenizer, RESPONSE - number % 2, seed=100 + number)
        responses.append(torch.tensor([*tokenizer(words).input_ids, END]))
    columns = {"prompts": prompts, "responses": ragged_from_rows(responses, dtype=torch.int64)}
    return TensorDict(columns, batch_size=[len(sizes)])


def test_log_probs_of_responses_are_those_of_transformers(tmp_path: Path) -> None:
    sizes = [1, 40, 4000]
    rows = rows_with_prompts(tmp_path, sizes)
    write_scored(rows, tmp_path / "scored.json")
    words = ["--nproc-per-node=1", str(PROGRAM), str(tmp_path), "fsdp:t1:1"]

    torchrun(words, tmp_path / "log.txt", seconds=800)

    assert lengths_of(rows["prompts"]).tolist() == sizes
    found = json.loads((tmp_path / "results.json").read_text())["fsdp:t1:1"]
    assert found.keys() == {"packed", "padded"}
    for gaps in found.values():
        assert len(gaps) == len(sizes) and all(gap < TOLERANCE for gap in gaps)
