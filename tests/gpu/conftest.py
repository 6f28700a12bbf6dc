"""Every test here needs a CUDA device and says so where there is none (docs/lab/GPU.md)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip(
            "no CUDA device: run `python -m pytest -m gpu tests/gpu` where one is (docs/lab/GPU.md)"
        )
