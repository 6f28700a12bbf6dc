"""vLLM draws under a grammar and stops at stop strings, as the built-in generator does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.programs.vllm_guided import SCHEMA

ROOT = Path(__file__).parents[2]


@pytest.mark.drill
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="needs xgrammar")
def test_vllm_obeys_a_schema_with_the_policys_log_probs_and_stops_within_8_tokens(
    tmp_path: Path,
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    command = [sys.executable, "-m", "tests.distributed.programs.vllm_guided", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])

    for text, error, num_forced in found["guided"]:
        jsonschema.validate(json.loads(text), SCHEMA)
        assert error < 2e-6 and num_forced > 0  # in float32, at log-probabilities near -5
    assert len(found["stopped"]) == 4
    for kept, drawn in found["stopped"]:
        assert kept < 300 and drawn - kept <= 8
