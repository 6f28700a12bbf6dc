"""Where SmolLM2-135M-Instruct is: a real model, with a real vocabulary and a real template."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
_IN_REPOSITORY = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
SMOLLM2 = Path(os.environ.get("SPMDFLOW_SMOLLM2", _IN_REPOSITORY))
IS_HERE = (SMOLLM2 / "config.json").is_file()
REASON = (
    f"no SmolLM2-135M-Instruct in {SMOLLM2}: put its Hugging Face folder there, or name another "
    f"one with the variable SPMDFLOW_SMOLLM2"
)

needs_smollm2 = pytest.mark.skipif(not IS_HERE, reason=REASON)
