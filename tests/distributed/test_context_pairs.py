"""Every pair of settings that matter where ranks divide rows, in as few runs as cover them."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.forked import torchrun

PROGRAM = Path(__file__).parent / "programs" / "context_objectives.py"
CHOICES = (
    ("c1", "c2", "c4"),
    ("", "d2"),
    ("", "padded"),
    ("ulysses", "ring"),
    ("", "unshared"),
    ("", "nine"),
    ("", "lora"),
)
"""Ranks that divide a row, data-parallel shares, padding, kind of attention, whether no rows share
a prompt, 8 heads with 2 for keys or 9 with 3, adapters."""
Case = tuple[str, ...]


def is_possible(case: Case) -> bool:
    """Ulysses with nine heads is refused, and one rank needs neither."""
    context, shares, _, attention, _, heads, _ = case
    if context == "c1":
        return shares == "d2"
    return (attention, heads) != ("ulysses", "nine")


def pairs_of(case: Case) -> set[tuple[tuple[int, str], ...]]:
    """Two settings at a time; the kind of attention means nothing on one rank."""
    numbered = [each for each in enumerate(case) if each[0] != 3 or case[0] != "c1"]
    return set(combinations(numbered, 2))


def covering_cases() -> list[Case]:
    """Cases that have every possible pair of settings: the one with most new pairs is next."""
    possible = [case for case in product(*CHOICES) if is_possible(case)]
    missing = set().union(*map(pairs_of, possible))
    chosen = []
    while missing:
        best = max(possible, key=lambda case: len(pairs_of(case) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


@pytest.mark.slow
def test_every_pair_of_settings_has_the_loss_and_gradient_of_whole_rows(tmp_path: Path) -> None:
    """All objectives: the policy losses of PPO, GRPO and distillation, the critic's, DPO, KTO and
    SFT. Losses within 1e-6, gradients within 5e-6 of their norm."""
    words = []
    for context, shares, *others in covering_cases():
        layout = shares + ("" if context == "c1" else context)
        words.append("-".join(["fsdp", *filter(None, others)]) + f"@{layout}")
    program = ["--nproc-per-node=8", str(PROGRAM), str(tmp_path), *words]
    torchrun(program, tmp_path / "log.txt", seconds=1800)
    found = json.loads((tmp_path / "results.json").read_text())

    assert {f"{case['kind']}@{case['layout']}" for case in found} == set(words)
    for case in found:
        assert case["norm"] > 1e-4, case
        assert case["loss"] < 1e-6, case
        assert case["gradient"] < 5e-6, case
