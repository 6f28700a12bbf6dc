"""Which settings a table of runs shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from spmdflow.tracking.summary_table import MOST_SETTINGS, differing_settings


def run(**settings: Any) -> Any:
    return SimpleNamespace(settings=settings)


def test_settings_that_differ_are_shown_but_not_names_of_runs() -> None:
    first = run(lr=1, seed=0, **{"run.dir": "a"})
    second = run(lr=2, seed=0, **{"run.dir": "b"})

    assert differing_settings([first, second, run()]) == ["lr"]


def test_runs_of_different_scripts_have_too_many_to_be_shown() -> None:
    most = {f"key{number}": 0 for number in range(MOST_SETTINGS)}
    others = dict.fromkeys(most, 1)

    assert differing_settings([run(**most), run(**others)]) == list(most)
    assert differing_settings([run(**most), run(**others, more=1)]) == []
