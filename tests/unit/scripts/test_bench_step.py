"""`bench.py step`: a step of a trace taken apart into stages and ranks."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from spmdflow.tracking.trace import Span, TraceWriter
from tests.policy.house import REPOSITORY


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/bench/step.py."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return importlib.import_module("bench.step")


def spans_of(number: int, start: float) -> list[Span]:
    """Two ranks: one generates 2 s and receives rows, the other 3 s; both update for 1 s."""
    return [
        Span(0, "compute", "actor.generate", start, start + 2, number),
        Span(1, "compute", "actor.generate", start, start + 3, number),
        Span(0, "transfer", "transfer 1 of actor.generate", start + 3, start + 4, number, 640),
        Span(0, "compute", "actor.update", start + 4, start + 5, number),
        Span(1, "compute", "actor.update", start + 4, start + 5, number),
    ]


def test_step_is_taken_apart_into_waiting_and_computing(step: ModuleType, tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    for number in range(1, 4):
        writer.write(spans_of(number, 10.0 * number))
    writer.close()

    rows = step.measure(argparse.Namespace(run_dir=tmp_path, step=None))

    found = {(row["stage"], row["rank"]): tuple(row.values())[2:] for row in rows}
    assert found == {
        ("actor.generate", 0): pytest.approx((0, 2, 0, 640)),
        ("actor.generate", 1): pytest.approx((0, 3, 1, 0)),
        ("actor.update", 0): pytest.approx((2, 1, 0, 0)),
        ("actor.update", 1): pytest.approx((1, 1, 0, 0)),
        ("between steps", 0): pytest.approx((5, 0, 0, 0)),
        ("between steps", 1): pytest.approx((5, 0, 0, 0)),
    }


def test_a_stage_that_a_step_has_twice_is_added_up(step: ModuleType, tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    writer.write(spans_of(1, 10.0) + spans_of(1, 20.0))
    writer.close()

    rows = step.measure(argparse.Namespace(run_dir=tmp_path, step=1))

    found = {(row["stage"], row["rank"]): tuple(row.values())[2:] for row in rows}
    assert found["actor.generate", 1] == pytest.approx((5, 6, 2, 0))
    assert found["actor.update", 1] == pytest.approx((2, 2, 0, 0))


def test_step_that_the_run_has_not_is_refused(step: ModuleType, tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    writer.write(spans_of(1, 10.0))
    writer.close()

    with pytest.raises(SystemExit, match="got step 2"):
        step.measure(argparse.Namespace(run_dir=tmp_path, step=2))
