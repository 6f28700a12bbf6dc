"""What a `flow.queue` starts and when, and its state in a checkpoint, in dry runs of its script."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spmdflow.config.load import load
from spmdflow.controller.flow import Flow
from spmdflow.controller.queue import RolloutQueue
from spmdflow.controller.step import Step
from spmdflow.errors import PlanError
from spmdflow.plan.trace import trace
from spmdflow.plan.transport import DryRunTransport
from spmdflow.runtime.call import Call, OnDone, Pending
from tests.unit.planned import ALGORITHMS, SMALL_GROUPS, settings_of


def traced_queue(max_staleness: int) -> tuple[RolloutQueue, list[dict[str, Any]]]:
    """The queue of grpo_async.py in a dry run, and its state at the end of each step."""
    words = (*SMALL_GROUPS, "placement=split", f"max_staleness={max_staleness}", "total_steps=9")
    loaded = load(ALGORITHMS / "grpo_async.py", None, words)
    queues: list[RolloutQueue] = []
    states: list[dict[str, Any]] = []

    def main(flow: Flow, cfg: Any) -> None:
        steps = flow.steps

        def watched_steps(total: int) -> Iterator[Step]:
            for step in steps(total):
                yield step
                states.append(flow.kept["generator.queue"].state_dict())

        flow.steps = watched_steps  # type: ignore[method-assign]
        loaded.script.main(flow, cfg)
        queues.append(flow.kept["generator.queue"])

    script = ModuleType(loaded.script.__name__)
    script.__file__ = loaded.script.__file__
    script.main = main  # type: ignore[attr-defined]
    trace(script, loaded.cfg, settings_of(2, num_steps=9))
    return queues[0], states


def test_resume_with_a_smaller_bound_says_how_old_the_tokens_of_the_next_steps_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, states = traced_queue(2)
    queue, _ = traced_queue(0)

    with caplog.at_level(logging.WARNING):
        queue.load_state_dict(states[4])

    (message,) = caplog.messages
    assert "In the next 2 steps their oldest tokens are up to 2 versions old" in message
    assert message.endswith("max_staleness=0 applies after these steps.")


@pytest.mark.parametrize("bound", [2, 3])
def test_resume_with_the_same_or_a_larger_bound_warns_of_nothing(
    bound: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, states = traced_queue(2)
    queue, _ = traced_queue(bound)

    with caplog.at_level(logging.WARNING):
        queue.load_state_dict(states[4])

    assert caplog.messages == []


class Events:
    """What a dry run tells its generator: a series of (what, number or version, step)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self.labels: list[str] = []
        submit = DryRunTransport.submit

        def noted(transport: DryRunTransport, call: Call, on_done: OnDone | None = None) -> Pending:
            self.labels.append(call.label)
            arguments: dict[str, Any] = {}
            for command in call.commands.values():
                arguments |= command.get("arguments", {})
            for name in arguments.keys() & {"number", "version"}:
                self.seen.append((call.label.partition(".")[2], arguments[name], call.step))
            return submit(transport, call, on_done)

        monkeypatch.setattr(DryRunTransport, "submit", noted)

    def starts(self) -> list[int]:
        """Numbers of the batches that were started, in order."""
        return [number for what, number, _ in self.seen if what == "begin_sequences"]

    def ages(self) -> list[int]:
        """Of each batch in its turn: versions between its start and its use."""
        version = 0
        started: list[int] = []
        ages = []
        for what, number, _ in self.seen:
            if what == "receive_weights":
                version = number
            if what == "begin_sequences":
                started.append(version)
            if what == "finish_sequences":
                ages.append(number - started[len(ages)])
        return ages

    def num_ahead(self) -> dict[int, int]:
        """Batches that are started and not used at the end of each step."""
        ahead = 0
        result = {}
        for what, _, step in self.seen:
            ahead += (what == "begin_sequences") - (what == "finish_sequences")
            result[step] = ahead
        return result


def trace_calls(
    folder: Path, calls: Sequence[int], *, max_staleness: int, batches_per_step: int = 1
) -> None:
    """A dry run of grpo_async.py whose step s takes calls[s - 1] batches at once."""
    text = (ALGORITHMS / "grpo_async.py").read_text()
    old = "        batch = next(queue)\n"
    assert text.count(old) == 1
    new = f"        number = {list(calls)}[step.number - 1]\n"
    new += "        batch = concatenate([next(queue) for _ in range(number)])\n"
    bound = "max_staleness=cfg.max_staleness"
    text = text.replace(old, new).replace(
        "from spmdflow import (", "from spmdflow import (\n    concatenate,"
    )
    text = text.replace(bound, f"{bound}, batches_per_step={batches_per_step}")
    (folder / "own.py").write_text(text)
    (folder / "own.yaml").write_text((ALGORITHMS / "grpo_async.yaml").read_text())
    words = (*SMALL_GROUPS, f"max_staleness={max_staleness}", f"total_steps={len(calls)}")
    loaded = load(folder / "own.py", None, words)
    trace(loaded.script, loaded.cfg, settings_of(2, num_steps=len(calls)))


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_steps_may_take_any_number_of_batches_and_each_has_its_number_and_a_bounded_age(
    bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [1, 3, 1, 2, 2, 1, 4]
    events = Events(monkeypatch)

    trace_calls(tmp_path, calls, max_staleness=bound)

    assert events.starts() == list(range(1, sum(calls) + 1))
    assert len(events.ages()) == sum(calls) and max(events.ages()) <= bound
    expected = {step: min(bound, len(calls) - step) for step in range(1, len(calls) + 1)}
    ahead = events.num_ahead()
    assert {step: ahead[step] for step in expected if step < 4} == {1: bound, 2: bound, 3: bound}
    assert ahead[7] == 0 and all(ahead[step] >= expected[step] for step in expected)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_queue_that_knows_the_batches_of_a_step_starts_those_of_whole_steps_ahead(
    bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events(monkeypatch)

    trace_calls(tmp_path, [2, 2, 2, 2], max_staleness=bound, batches_per_step=2)

    assert events.starts() == list(range(1, 9))
    assert max(events.ages()) == min(bound, 3)
    assert events.num_ahead() == {step: 2 * min(bound, 4 - step) for step in range(1, 5)}


def test_step_that_takes_fewer_batches_than_it_said_is_told_so_once_rows_are_too_old(
    tmp_path: Path,
) -> None:
    with pytest.raises(PlanError, match=r"at most max_staleness=1.*batches_per_step=3") as caught:
        trace_calls(tmp_path, [1] * 6, max_staleness=1, batches_per_step=3)

    assert "got weights 2 versions newer" in str(caught.value)


@pytest.mark.parametrize("number", [0, -1, True, 1.5])
def test_number_of_batches_that_is_none_is_refused(number: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=rf"got batches_per_step={number}.*at least 1"):
        trace_calls(tmp_path, [1], max_staleness=0, batches_per_step=number)


def test_call_on_the_generators_ranks_interrupts_what_it_generates_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events(monkeypatch)

    trace_calls(tmp_path, [2, 2], max_staleness=1)

    marks = ("finish_sequences", "go_on", "halt", "concatenate", "reach")
    told = [label.partition(".")[2] for label in events.labels if " of " not in label]
    turn = ["finish_sequences", "go_on", "halt"]
    expected = [*turn, *turn, "concatenate", "go_on", "reach"]
    assert [label for label in told if label in marks][: len(expected)] == expected


def test_number_of_batches_taken_is_restored_and_known_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, states = traced_queue(2)

    assert [state["taken"] for state in states] == list(range(1, 10))
    state = {name: value for name, value in states[4].items() if name != "taken"}
    queue.load_state_dict(state)  # of a checkpoint that an older version has written
    assert queue.state_dict()["taken"] is None
