"""What sees a run from outside: its timeline, its list of calls, a dry run, a step that is kept.

Observers read the records of calls. Nothing in the run depends on what they do: `Flow` calls them
in the order in which they were given, and works the same without any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spmdflow.controller.caller import Caller
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.transfers import Edge
from spmdflow.runtime.call import CallRecord
from spmdflow.tracking.call_log import CallLog
from spmdflow.tracking.trace import Span, TraceWriter


@dataclass(frozen=True)
class StepRecord:
    """A step that is over: everything that was sent has been answered."""

    number: int
    """0: the evaluation before the first step."""
    calls: Sequence[CallRecord]
    """In the order of the script."""
    transfers: Sequence[CallRecord]
    """In the order in which they were released."""
    metrics: Mapping[str, float]
    planned_bytes: Counter[Edge]
    """Of rows by (source, destination) since the run began, as the controller planned them."""
    moved_bytes: Counter[Edge]
    """The same, as the ranks counted them."""


class ObservedFlow(Protocol):
    """What an observer may ask of the flow."""

    caller: Caller
    groups: dict[str, WorkerGroup]
    kept: dict[str, Any]
    spawned: dict[str, WorkerGroup]

    def state(self, number: int) -> dict[str, Any]:
        """What a run that continues after a step needs besides the models."""

    def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written is sealed."""


class Observer:
    """Sees a run; each method is called in the script's thread. By default it ignores all."""

    def attach(self, flow: ObservedFlow) -> None:
        """The flow that it sees; called once, before the script."""

    def assume(self, examples: Mapping[str, Any]) -> None:
        """The script says what values only a run knows look like (`Flow.assume`)."""

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """The run continues from a checkpoint; state: the flow's part of it."""

    def begin_steps(self, first: int, last: int) -> None:
        """The steps of this launch are about to begin."""

    def begin_step(self, number: int) -> None:
        """A step begins."""

    def end_script(self, number: int) -> None:
        """The script has done its part of the step; what follows is the flow's."""

    def end_step(self, step: StepRecord) -> None:
        """A step is over, and not saved yet."""

    def close(self) -> None:
        """The run ends, also by an error."""


class Timeline(Observer):
    """RUN_DIR/trace.json: what each lane of each rank did when."""

    def __init__(self, path: Path) -> None:
        self._writer = TraceWriter(path)

    def end_step(self, step: StepRecord) -> None:
        """Write the spans of a step."""
        self._writer.write(_spans_of(step))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _spans_of(step: StepRecord) -> Iterator[Span]:
    """Yield one span for each rank of each call, then of each transfer, of a step.

    Start and end are times of the rank's own clock.
    """
    for record in (*step.calls, *step.transfers):
        call = record.call
        for rank, reply in record.replies.items():
            start, end = reply["span"]
            yield Span(
                rank,
                call.lane,
                call.label,
                start,
                end,
                step=step.number,
                received_bytes=sum(reply.get("received", {}).values()),
                host_bytes=reply.get("host_bytes", 0),
            )


class CallList(Observer):
    """RUN_DIR/calls.jsonl: one line for each call."""

    def __init__(self, run_dir: Path, *, last_step: int) -> None:
        """last_step: of the checkpoint that the run continues from; -1: none."""
        self._log = CallLog(run_dir, last_step=last_step)

    def end_step(self, step: StepRecord) -> None:
        """Write the calls of a step."""
        self._log.write([record.to_line() for record in (*step.calls, *step.transfers)])
