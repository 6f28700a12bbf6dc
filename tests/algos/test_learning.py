"""Entries of scripts/learn.py at reduced size: every algorithm learns the bundled task."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.learn.curves import points_of
from scripts.learn.entry import Entry
from scripts.learn.runs import Processes, finished_or_none, perform
from scripts.learn.table import BUNDLED_ENTRIES, CONSTRAINED_ENTRIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("entry", BUNDLED_ENTRIES, ids=lambda entry: entry.name)
def test_ten_steps_from_the_same_start_bring_most_of_the_way(entry: Entry, tmp_path: Path) -> None:
    short = entry.with_settings(("total_steps=10", "eval_every=10", "save_every=0"))

    run = perform(short, 3, tmp_path, Processes())  # a seed that docs/LEARNING.md does not show

    accuracy = {step: value for step, (value,) in points_of([run], entry.metric).items()}
    assert accuracy[0] == pytest.approx(0.539, abs=1e-3)
    assert accuracy[10] > 0.85  # 0.9 and more after 20
    assert finished_or_none(short, 3, tmp_path) == run


@pytest.mark.parametrize("entry", CONSTRAINED_ENTRIES, ids=lambda entry: entry.name)
def test_the_cost_is_driven_below_its_limit_and_the_multiplier_turns(
    entry: Entry, tmp_path: Path
) -> None:
    short = entry.with_settings(("total_steps=24", "eval_every=0", "save_every=0"))

    run = perform(short, 3, tmp_path, Processes())

    costs, multipliers, rewards = (
        [value for (value,) in points_of([run], name).values()]
        for name in ("cost/mean", "multiplier", "reward/mean")
    )
    assert costs[0] > 0.1 > min(costs)
    rises = [later > earlier for earlier, later in zip(multipliers, multipliers[1:])]
    assert rises[0] and not all(rises)
    assert max(rewards) > rewards[0]
