"""Holds runs that were resumed under another layout against the uninterrupted ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.algos.runs import numbers_of
from tests.distributed.programs.layout_matrix import LAYOUTS, SAVED, Cells

_LOSSES = ("actor/loss", "actor/pg_loss", "critic/loss")
_EXACT = ("actor/lr", "critic/lr", "rollout/weights_version", "rollout/prompt_tokens")
_RANKS_OF_A_ROLE = {"split": 2, "standalone": 1}


def check_bits(folder: Path, cells: Cells) -> None:
    """Every rank of actor and critic loaded the weights, moments and counts that were saved."""
    for saved, layout in cells:
        files = sorted((folder / f"{saved}-to-{layout}").glob("loaded-*.json"))
        assert len(files) == 2 * _RANKS_OF_A_ROLE.get(layout, LAYOUTS[layout][0]), (layout, files)
        for file in files:
            found = json.loads(file.read_text())
            assert found["wrong"] == [] and found["steps_done"] == 4 and found["of"] > 30, file


def check_losses(folder: Path, cells: Cells) -> dict[str, float]:
    """The next three losses are those of the uninterrupted run to 1e-6: float32 sums in another
    order, over six optimizer steps. The same layout: every metric but clocks, bit for bit.

    Gives the largest difference of each cell.
    """
    worst = {}
    for saved, layout in cells:
        runs = folder / saved, folder / f"{saved}-to-{layout}"
        ahead, after = (numbers_of(run)[SAVED:] for run in runs)
        assert len(ahead) == len(after) == 3
        steps = list(zip(ahead, after, strict=True))
        worst[f"{saved} -> {layout}"] = max(abs(a[n] - b[n]) for a, b in steps for n in _LOSSES)
        for a, b in steps:
            assert {n: a[n] for n in _EXACT} == {n: b[n] for n in _EXACT}, (saved, layout)
            assert b["kl_coef"] == pytest.approx(a["kl_coef"], rel=1e-6), (saved, layout)
        assert saved != layout or ahead == after, saved
    assert max(worst.values()) < 1e-6, worst
    return worst
