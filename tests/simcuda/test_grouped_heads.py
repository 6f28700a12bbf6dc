"""float32 with grouped heads under transformers' modules, on a simulated device."""

from __future__ import annotations

import json
from pathlib import Path

from tests.simcuda.conftest import Simulated


def test_float32_with_grouped_heads_stores_no_scores_and_equals_the_host(
    simulated: Simulated, tmp_path: Path
) -> None:
    program = Path(__file__).parent / "programs/grouped_heads.py"

    found = json.loads(simulated(program, tmp_path).splitlines()[-1])

    assert "attention by the math kernel" not in found["waits"], found
    assert found["gap"] < 1e-5  # repeated heads' gradients are summed in another order
