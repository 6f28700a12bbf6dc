"""Random token ids of rows, the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor


def random_tokens(*lengths: int) -> list[Tensor]:
    """A row of ids from 3 to 319 for each length."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 320, (length,), generator=generator) for length in lengths]
