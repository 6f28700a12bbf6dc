"""A run saved under each layout goes on under every other: the same bits, then the same losses.

Two cells of it are in test_saving.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.moved import check_bits, check_losses
from tests.distributed.programs.layout_matrix import LAYOUTS, run_cells

if find_spec("megatron") is None:
    pytest.skip("the megatron extra is not installed", allow_module_level=True)

SIX = tuple(LAYOUTS)[:6]
PLACED = (("split", "fsdp-d4"), ("standalone", "split"), ("fsdp-d1", "standalone"))
CELLS = (*itertools.product(SIX, SIX), *PLACED)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_each_of_six_layouts_and_of_three_placements_resumes_what_any_other_saved(
    tmp_path: Path, spawn_ranks: Callable[..., list[Any]]
) -> None:
    spawn_ranks(run_cells, 4, str(tmp_path), CELLS, seconds=2900)

    check_bits(tmp_path, CELLS)
    worst = check_losses(tmp_path, CELLS)

    print(*(f"{cell}: {value:.1e}" for cell, value in worst.items()), sep="\n")
