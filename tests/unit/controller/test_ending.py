"""Whether there is time for a step and a checkpoint, by what was measured."""

from __future__ import annotations

import pytest

from spmdflow.controller import ending
from spmdflow.controller.ending import Ending


class Clock:
    """A clock that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(ending.time, "monotonic", lambda: self.now)

    def step(self, run: Ending, seconds: float) -> None:
        run.begin_step()
        self.now += seconds
        run.end_step()


def test_run_ends_while_another_step_and_its_save_still_fit(monkeypatch):
    clock = Clock(monkeypatch)
    run = Ending(3600.0, age=60.0)
    age = 60.0
    run.save_seconds = 40.0
    while not run.is_due():
        clock.step(run, 100.0)
        age += 100.0

    assert age + 40 < 3600, "the save is not cut off"
    assert age + 100 + 1.25 * (100 + 40) > 3600, "and another step would not have fitted"


def test_run_without_a_limit_never_ends_early(monkeypatch):
    clock = Clock(monkeypatch)
    run = Ending(None, age=60.0)
    clock.step(run, 1e9)

    assert not run.is_due() and run.can_save()


@pytest.mark.parametrize(
    ("step", "save", "said", "fits"),
    [
        (10.0, 5.0, "saving after this step and stopping (this step needs about 8 s more", True),
        (100.0, 5.0, "this step needs about 98 s more, saving 5 s, but torchrun kills", True),
        (10.0, 40.0, "saving 40 s, but torchrun kills all ranks in 28 s", False),
    ],
)
def test_sigterm_is_answered_with_what_will_happen(monkeypatch, step, save, said, fits):
    clock = Clock(monkeypatch)
    run = Ending(None, age=0.0, shutdown=30.0)
    clock.step(run, step)
    run.save_seconds = save
    run.begin_step()
    clock.now += 2.0

    text = run.ask()

    assert said in text
    assert ("continues from the last checkpoint" in text) == ("kills" in said)
    clock.now += 8.0
    assert run.can_save() == fits


def test_step_and_save_of_minutes_fit_where_torchrun_was_told_to_wait(monkeypatch):
    clock = Clock(monkeypatch)
    run = Ending(None, age=0.0, shutdown=600.0)
    clock.step(run, 300.0)
    run.save_seconds = 200.0
    run.begin_step()

    text = run.ask()

    assert "saving after this step and stopping" in text
    clock.now += 300.0
    assert run.can_save()
