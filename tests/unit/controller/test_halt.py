"""A generator that draws ahead is halted at the end of a step, also if the script does not sync."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdflow.config.load import load
from spmdflow.plan.trace import trace
from spmdflow.plan.transport import DryRunTransport
from spmdflow.runtime.call import Call, OnDone, Pending
from tests.unit.planned import ALGORITHMS, SMALL_GROUPS, settings_of

SCRIPT = (ALGORITHMS / "grpo_async.py").read_text()


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Labels of all orders of a dry run, also of those that end a call early; the ends of steps."""
    labels: list[str] = []
    submit = DryRunTransport.submit

    def noted(transport: DryRunTransport, call: Call, on_done: OnDone | None = None) -> Pending:
        labels.append(call.label)
        return submit(transport, call, on_done)

    end_step = DryRunTransport.end_step

    def noted_end(
        transport: DryRunTransport, number: int, planned: Counter[tuple[int, int]]
    ) -> None:
        labels.append("end")
        end_step(transport, number, planned)

    monkeypatch.setattr(DryRunTransport, "submit", noted)
    monkeypatch.setattr(DryRunTransport, "end_step", noted_end)
    yield labels


@pytest.mark.parametrize("syncs", [True, False])
def test_generator_is_halted_once_a_step_whether_or_not_the_script_syncs(
    tmp_path: Path, orders: list[str], syncs: bool
) -> None:
    lines = SCRIPT.splitlines()
    kept = [line for line in lines if syncs or ".sync()" not in line]
    assert len(kept) == len(lines) - (0 if syncs else 1)
    (tmp_path / "own.py").write_text("\n".join(kept))
    (tmp_path / "own.yaml").write_text((ALGORITHMS / "grpo_async.yaml").read_text())
    loaded = load(tmp_path / "own.py", None, SMALL_GROUPS)

    trace(loaded.script, loaded.cfg, settings_of(4, num_steps=3))

    marks = ("generator.go_on", "actor.reach", "end")
    told = [label for label in orders if label in marks]
    assert told == ["generator.go_on", "actor.reach", "end"] * 2 + ["end"]
