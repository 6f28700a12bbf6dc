"""Runs a script on no device and returns what it asked of every rank."""

from __future__ import annotations

import ast
import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdflow.config.leaf import parts_of
from spmdflow.config.placement import pools_of
from spmdflow.config.schema import DataSettings, RolloutConfig
from spmdflow.controller.caller import Caller
from spmdflow.controller.flow import Flow
from spmdflow.controller.observer import Observer, StepRecord
from spmdflow.controller.result import UnknownMetric
from spmdflow.controller.saving import NoSaving
from spmdflow.errors import PlanError, SpmdflowError
from spmdflow.plan.example import PROMPTS, RESPONSES, Examples
from spmdflow.plan.record import Read, Trace, links_of, models_of
from spmdflow.plan.replay import Replay
from spmdflow.plan.transport import MOST_CALLS, Answers, DryRunTransport, Lines


@dataclass(frozen=True)
class TraceSettings:
    """How to run a script dry."""

    world: tuple[int, ...]
    """Ranks of the run."""
    nodes: tuple[int, ...]
    """Node of each rank of the cluster, by rank."""
    backend: str = "gloo"
    """Backend of compute-lane groups: nccl on GPUs."""
    num_steps: int = 1
    start: Mapping[str, Any] | None = None
    """The flow's part of a checkpoint that the steps follow; None: they are the first."""
    with_evaluation: bool = False
    """Whether the evaluation before step 1 is traced too."""
    examples: Mapping[str, Any] = field(default_factory=dict)
    """Values that only a run knows, by name; they overrule the script's."""
    most_calls: int = MOST_CALLS
    read_data: bool = True
    """Whether prompt lengths come from the data file, if it is there and small."""


def settings_of_run(replay: Replay, *, backend: str = "gloo") -> TraceSettings:
    """The ranks, nodes and steps of a run."""
    return TraceSettings(
        world=replay.ranks,
        nodes=tuple(replay.nodes.get(rank, 0) for rank in range(max(replay.ranks) + 1)),
        backend=backend,
        num_steps=max(replay.steps) - (int(replay.start["step"]) if replay.start else 0),
        start=replay.start,
        with_evaluation=0 in replay.steps,
        most_calls=MOST_CALLS + len(replay.orders),
        read_data=False,
    )


def trace(
    script: ModuleType, cfg: Any, settings: TraceSettings, replay: Replay | None = None
) -> Trace:
    """Run script.main(flow, cfg) without ranks or devices, and return the calls that it made.

    Raises PlanError, with the script's line, for any error in the script or in spmdflow, and for
    SystemExit. Other errors from outside of the script are raised as they are. The controller's log
    lines below ERROR are off meanwhile.
    Any: an object of the script's settings class.
    replay: a run whose lengths and values are used instead of examples.
    """
    file = str(script.__file__)
    examples = Examples(settings.examples, longest_rows(cfg), is_replayed=replay is not None)
    answers = Answers(examples, replay, read_data=settings.read_data)
    transport = DryRunTransport(settings.nodes, answers, file, most_calls=settings.most_calls)
    caller = Caller(transport, cfg.run, settings.world, on_read=transport.use)
    pools = pools_of(cfg, settings.world)
    first = int(settings.start["step"]) if settings.start else 0
    flow = Flow(
        caller,
        cfg,
        pools,
        None,
        NoSaving(settings.start),
        None,
        backend=settings.backend,
        observers=[DryRun(transport, caller, replay)],
        stop_after=first + settings.num_steps,
        evaluates_first=settings.with_evaluation,
    )
    logger = logging.getLogger("spmdflow.controller")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the controller's log lines are about a real run
    try:
        script.main(flow, cfg)
    except (Exception, SystemExit) as err:
        frames = traceback.extract_tb(err.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == file), None)
        if line is None and not isinstance(err, SpmdflowError):
            raise  # not the script's error
        raise PlanError(_locate_error(err, line, examples)) from err
    finally:
        logger.setLevel(level)
    guessed = sorted(examples.guessed)
    return Trace(
        world=settings.world,
        nodes=tuple(settings.nodes[rank] for rank in settings.world),
        pools=pools,
        models=models_of(transport.calls, pools),
        links=links_of(transport.calls),
        calls=tuple(transport.calls),
        tokens=transport.tokens,
        steps=tuple(transport.steps),
        reads=tuple(_reads_of(script, transport)),
        assumptions=(
            *answers.notes,
            *examples.used_text(),
            *(f"column {name}: float32, one a row" for name in guessed),
        ),
        edges_by_step=transport.edges,
        choices=tuple(caller.old_log_probs.choices.values()),
    )


def _locate_error(err: BaseException, line: int | None, examples: Examples) -> str:
    """Return the text of a PlanError: the script's line, what went wrong, what to change.

    A metric that no call reported needs an example; an error of spmdflow has its own advice; any
    other error is shown with the examples that were used. line: None if it is not known.
    """
    text = str(err)
    if isinstance(err, UnknownMetric) and err.is_omitted:
        text = f"reads {err.args[0]}"
    elif isinstance(err, UnknownMetric):
        text = (
            f"reads {err.name!r}, which only a run knows, expected an example; declare it with "
            f"flow.assume({{{err.name!r}: 0.5}}) at the top of main"
        )
    elif not isinstance(err, SpmdflowError):
        seen = ", ".join(examples.used_text())
        text = (
            f"got {type(err).__name__}: {err}, expected main to run to the end of its steps on "
            f"examples ({seen or 'none was read'}); fix the line, or declare an example that it "
            f"can work with: flow.assume(name=value) at the top of main, or --assume name=value"
        )
    if line is None or text.startswith("script line"):
        return text
    return f"script line {line}: {text}"


def longest_rows(cfg: Any) -> dict[str, int]:
    """Return the most tokens that the settings allow: {"prompts": ..., "responses": ...}.

    They are data.max_prompt_tokens and rollout.max_new_tokens, 1 without such a section.
    """
    data = next((part for _, part in parts_of(cfg, DataSettings)), None)
    rollout = next((part for _, part in parts_of(cfg, RolloutConfig)), None)
    prompts = data.max_prompt_tokens if data else 1
    return {PROMPTS: prompts, RESPONSES: rollout.max_new_tokens if rollout else 1}


class DryRun(Observer):
    """Tells the transport of a dry run where the script is, and what a run would have measured."""

    def __init__(self, transport: DryRunTransport, caller: Caller, replay: Replay | None) -> None:
        self._transport = transport
        self._caller = caller
        self._replay = replay

    def assume(self, examples: Mapping[str, Any]) -> None:
        """Keep the script's examples."""
        self._transport.answers.examples.add(examples)

    def begin_steps(self, first: int, last: int) -> None:
        """The first step sees the examples as measured."""
        self._caller.old_log_probs.end_step(self._transport.answers.examples.metrics(), {})

    def begin_step(self, number: int) -> None:
        """The script begins to look at results."""
        self._transport.begin_step(number)
        self._transport.is_looking = True

    def end_script(self, number: int) -> None:
        """What is looked at from here on is not the script's."""
        self._transport.is_looking = False

    def end_step(self, step: StepRecord) -> None:
        """Store the row bytes of the step, and let the transport record the script's reads again.

        In a replay, the next step sees the metrics that the run measured in this step.
        """
        if self._replay is not None:
            metrics = self._replay.metrics(step.number)
            self._caller.old_log_probs.end_step(metrics, self._caller.num_updates)
        self._transport.end_step(step.number, step.planned_bytes)
        self._transport.is_looking = True


_LOOPS = (ast.While, ast.For, ast.AsyncFor)


def _reads_of(script: ModuleType, transport: DryRunTransport) -> list[Read]:
    """Return every line of the script that waited for values, by line; then loops that made calls.

    A line counts once, with everything that it waited for. A loop over flow.steps(...) does not
    count, nor a loop that starts on a line that waited.
    """
    inner = _inner_loops(Path(str(script.__file__)).read_text(encoding="utf-8"))
    read_at: dict[int, dict[str, None]] = {}
    waits = [lines for lines, _ in transport.waits]
    looping = set()
    for lines in waits:
        if any(_encloses(loop, lines) for loop in inner):
            looping.add(lines[0])
    for (line, *_), what in transport.waits:
        read_at.setdefault(line, {})[what] = None
    reads = [Read(line, ", ".join(what), line in looping) for line, what in sorted(read_at.items())]
    calls = set(transport.paths)
    for loop in inner:
        if loop.start not in read_at and any(_encloses(loop, lines) for lines in calls):
            what = f"loop over lines {loop.start}-{loop.stop - 1}"
            is_waiting = any(_encloses(loop, lines) for lines in waits)
            reads.append(Read(loop.start, what, True, waits=is_waiting))
    return reads


def _encloses(loop: range, lines: Lines) -> bool:
    return any(line in loop for line in lines)


def _inner_loops(text: str) -> list[range]:
    """Return the lines of each loop statement (for, while, async for) in the text of a script.

    Loops over flow.steps(...), and loops that contain one, are omitted.
    """
    line_ranges = []
    for loop in ast.walk(ast.parse(text)):
        if isinstance(loop, _LOOPS) and not any(map(_is_over_steps, ast.walk(loop))):
            line_ranges.append(range(loop.lineno, (loop.end_lineno or loop.lineno) + 1))
    return line_ranges


def _is_over_steps(node: ast.AST) -> bool:
    """`for step in flow.steps(...)`, also inside of enumerate and the like."""
    return isinstance(node, ast.For | ast.AsyncFor) and any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr == "steps"
        for part in ast.walk(node.iter)
    )
