"""The state of a `flow.queue` in a checkpoint, looked at in a dry run of the bundled script."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from spmdflow.config.load import load
from spmdflow.controller.flow import Flow
from spmdflow.controller.queue import RolloutQueue
from spmdflow.controller.step import Step
from spmdflow.plan.trace import trace
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
