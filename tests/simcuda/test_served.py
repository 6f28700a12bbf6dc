"""A generation server on a simulated device: it sleeps, gives its memory back, and wakes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.simcuda.conftest import Simulated

PROGRAM = Path(__file__).parent / "programs" / "served_sleep.py"


@pytest.mark.drill
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_a_server_that_slept_draws_the_same_tokens_after_it_wakes(
    simulated: Simulated, tmp_path: Path
) -> None:
    *_, line = simulated(PROGRAM, tmp_path).splitlines()
    found = json.loads(line)
    before, after = found["responses"]

    assert before == after
    assert found["asleep"] == [True, True]
    assert found["awake"] == [True]
