"""Every test here needs a CUDA device and says so where there is none (docs/GPU.md)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: run `scripts/test.sh -m gpu` on a machine that has one")
