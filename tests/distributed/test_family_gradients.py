"""Gradients of one step of many families, on 1, 2 and 4 ranks, with their auxiliary loss.

The padding token occurs in the text of one row: its embedding is not trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.families.tiny import FAMILIES
from tests.distributed.ranks import run_ranks
from tests.forked import torchrun
from tests.gpu.families import gradients

PROGRAM = Path(__file__).parent / "programs" / "family_gradients.py"
BY_DEFAULT = ("qwen3_moe", "deepseek_v3", "gpt_oss")
KINDS = ("fsdp", "zero1", "zero2", "zero3")
TOKENS = 128
"""Of all rows of the program."""
HIDDEN_BYTES = 64 * 4
"""Of a token's hidden states."""
EXPERT_LAYOUTS = ("e2", "t2e2-recompute", "e2p2", "e2d4-plain_optimizer", "e2p2-padded-recompute")


def measured(folder: Path, kinds: tuple[str, ...], families: tuple[str, ...]) -> list[Any]:
    """What four ranks measured."""
    words = ["--nproc-per-node=4", str(PROGRAM), str(folder), ",".join(kinds), *families]
    torchrun(words, folder / "log.txt", seconds=840)
    return json.loads((folder / "results.json").read_text())


def judge(found: list[Any], kinds: tuple[str, ...], families: tuple[str, ...]) -> None:
    """Every case is there; gradients within 5e-6 of their norm, auxiliary losses within 1e-6."""
    expected = {(family, kind, dp) for family in families for kind in kinds for dp in (1, 2, 4)}
    assert {(case["family"], case["kind"], case["dp"]) for case in found} == expected
    check_gaps(found)


def check_gaps(found: list[Any]) -> None:
    """Gradients within 5e-6 of their norm, norms and auxiliary losses within 1e-6, log-probs with
    replayed routes within 1e-5."""
    for case in found:
        assert case["replay"] < 1e-5, case
        assert case["gradient"] < 5e-6, case
        assert case["norm"] < 1e-6, case
        assert case["balance"] < 1e-6, case


def test_gradients_of_mixtures_with_their_auxiliary_loss_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    found = measured(tmp_path, ("fsdp",), BY_DEFAULT)

    judge(found, ("fsdp",), BY_DEFAULT)
    assert min(case["auxiliary"] for case in found) > 2.0  # 2 experts per token; even: exactly 2


def test_gradients_of_experts_that_shards_divide_are_those_of_transformers(tmp_path: Path) -> None:
    kinds = ("fsdp-e2-recompute", "fsdp-d4e2-keep_gathered", "zero2-e4", "zero3-d4e2")

    found = measured(tmp_path, kinds, BY_DEFAULT)

    assert len(found) == len(BY_DEFAULT) * len(kinds)
    check_gaps(found)
    for case in found:
        if case["family"] == "qwen3_moe":
            check_bytes(case)


def test_gradients_of_rows_that_ranks_divide_are_those_of_transformers(tmp_path: Path) -> None:
    """Sliding windows, sinks and experts, packed and padded, by both ways of attention."""
    kinds = ("fsdp-d2c2-recompute", "zero2-c4-padded", "fsdp-c2-gather", "zero3-d2c2-gather-padded")
    kinds += ("fsdp-d2c2-ring-recompute", "zero2-c4-ring-padded")
    families = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_moe")

    found = measured(tmp_path, kinds, families)

    assert len(found) == len(families) * len(kinds)
    check_gaps(found)


def check_bytes(case: dict[str, Any]) -> None:
    """What the ranks send to experts and back is what even loads need, within 10 %."""
    ep_size = int(re.search(r"e(\d)", case["kind"].partition("-")[2])[1])
    exchanges = 8 if "recompute" in case["kind"] else 6  # counting, forward, backward: 2 each
    copies = 2 * TOKENS * 2  # 2 experts of each token, 2 layers
    planned = exchanges * copies * HIDDEN_BYTES * (1 - 1 / ep_size)
    assert case["expert_bytes"] == pytest.approx(planned, rel=0.1), case


def test_gradients_of_divided_experts_are_those_of_transformers(tmp_path: Path) -> None:
    layouts = (*EXPERT_LAYOUTS, "t2c2", "c2e2-recompute")
    kinds = tuple(f"megatron-{layout}" for layout in layouts)

    found = measured(tmp_path, kinds, ("qwen3_moe", "mixtral"))

    assert len(found) == 2 * len(kinds)
    check_gaps(found)
    for case in found:
        if "padded" not in case["kind"] and "c2" not in case["kind"]:  # padding is routed, too
            check_bytes(case)


def test_gradients_in_bfloat16_on_a_cpu_are_close_to_those_of_transformers(tmp_path: Path) -> None:
    allowed = {"gemma2": 0.03, "gpt2": 0.03, "qwen3_moe": 0.2, "gpt_oss": 0.2}  # routers flip

    (found,) = run_ranks(gradients, 1, "cpu", tmp_path, "fsdp", "bfloat16", list(allowed))

    for family, gaps in found.items():
        assert "error" not in gaps, gaps["error"]
        assert gaps["gradient"] < allowed[family], (family, gaps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_all_families_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    names = tuple(FAMILIES)
    for start in range(0, len(names), 8):
        folder = tmp_path / str(start)
        folder.mkdir()
        some = names[start : start + 8]
        judge(measured(folder, (kind,), some), (kind,), some)
