"""The trainer's log-probabilities with SmolLM2's weights, against plain transformers in float32.

One rank, prompts of 1 to 4,000 tokens, and responses whose last token is the padding too. Sums in
another order through 30 layers differ by less than 1e-4.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import torchrun
from tests.smollm2 import needs_smollm2

pytestmark = [needs_smollm2, pytest.mark.drill]

PROGRAM = Path(__file__).parent / "programs" / "smollm2_engine.py"
TOLERANCE = 1e-4


def test_log_probs_of_responses_are_those_of_transformers(tmp_path: Path) -> None:
    sizes = [1, 40, 4000]
    words = ["--nproc-per-node=1", str(PROGRAM), str(tmp_path), *map(str, sizes)]

    torchrun(words, tmp_path / "log.txt", seconds=800)

    found = json.loads((tmp_path / "results.json").read_text())
    assert found["prompts"] == sizes
    assert found["gaps"].keys() == {"packed", "padded"}
    for gaps in found["gaps"].values():
        assert len(gaps) == len(sizes) and max(gaps) < TOLERANCE
