"""A run saved under one layout goes on under any other: same bits, then the same losses.

Losses: to 1e-6 of the uninterrupted run on the same rollouts (float32 sums in another order, over
six optimizer steps). The same layout: every metric, bit for bit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.algos.runs import numbers_of
from tests.distributed.programs import layout_matrix as program

pytest.importorskip("megatron.core", reason="the megatron extra is not installed")

SIX = tuple(program.LAYOUTS)[:6]
MATRIX = tuple(itertools.product(SIX, SIX))
PLACED = (("split", "fsdp-d4"), ("standalone", "split"), ("fsdp-d1", "standalone"))
TELLING = (("t2p2d1", "zero1-d2"), ("zero1-d2", "t2p1d2"), ("zero1-d2", "zero1-d2"))
LOSSES = ("actor/loss", "actor/pg_loss", "critic/loss")
EXACT = ("actor/lr", "critic/lr", "rollout/weights_version", "rollout/prompt_tokens")


@pytest.fixture(
    scope="module",
    params=[
        TELLING,
        pytest.param((*MATRIX, *PLACED), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=len,
)
def cells(
    tmp_path_factory: pytest.TempPathFactory,
    spawn_ranks: Callable[..., list[Any]],
    request: pytest.FixtureRequest,
) -> dict[tuple[str, str], tuple[Path, Path]]:
    """(saved, resumed) -> the uninterrupted run and the one that was moved."""
    out = tmp_path_factory.mktemp("matrix")
    spawn_ranks(program.run_cells, 4, str(out), request.param, seconds=3600)
    return {(a, b): (out / a, out / f"{a}-to-{b}") for a, b in request.param}


def test_weights_moments_and_counts_have_the_saved_bits(cells):
    for (_, layout), (_, moved) in cells.items():
        files = sorted(moved.glob("loaded-*.json"))
        ranks = {"split": 2, "standalone": 1}.get(layout, program.LAYOUTS[layout][0])
        assert len(files) == 2 * ranks, (moved.name, files)
        for file in files:
            found = json.loads(file.read_text())
            assert found["wrong"] == [] and found["steps_done"] == 4 and found["of"] > 30, file


def test_next_three_losses_are_those_of_the_uninterrupted_run(cells):
    worst = {}
    for cell, (whole, moved) in cells.items():
        ahead, after = (numbers_of(run)[program.SAVED :] for run in (whole, moved))
        assert len(ahead) == len(after) == 3
        worst[cell] = max(
            abs(a[name] - b[name]) for a, b in zip(ahead, after, strict=True) for name in LOSSES
        )
        for a, b in zip(ahead, after, strict=True):
            assert {n: a[n] for n in EXACT} == {n: b[n] for n in EXACT}, cell
            assert b["kl_coef"] == pytest.approx(a["kl_coef"], rel=1e-6), cell
        if cell[0] == cell[1]:
            assert ahead == after, cell

    print(*(f"{a} -> {b}: {value:.1e}" for (a, b), value in worst.items()), sep="\n")
    assert max(worst.values()) < 1e-6, worst
