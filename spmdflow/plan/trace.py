"""Runs a script on no device and returns what it asked of every rank."""

from __future__ import annotations

import ast
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdflow.config.leaf import parts_of
from spmdflow.config.placement import pools_of
from spmdflow.config.schema import DataSettings, RolloutConfig, RunConfig
from spmdflow.controller.assignment import Target
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.ending import Ending
from spmdflow.controller.flow import Flow
from spmdflow.controller.result import Result, RowResult
from spmdflow.controller.step import Step
from spmdflow.data.row_id import Ids
from spmdflow.errors import PlanError, SpmdflowError
from spmdflow.plan.example import PROMPTS, RESPONSES, Examples
from spmdflow.plan.record import Read, Trace, links_of, models_of
from spmdflow.plan.replay import Replay
from spmdflow.plan.transport import MOST_CALLS, Answers, Lines, TraceTransport
from spmdflow.worker_api.register import method_spec


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
    """Run script.main(flow, cfg) dry. PlanError, with the line, for what cannot be planned.

    Any: an object of the script's settings class.
    """
    file = str(script.__file__)
    examples = Examples(settings.examples, _longest(cfg), is_replayed=replay is not None)
    answers = Answers(examples, replay, read_data=settings.read_data)
    transport = TraceTransport(settings.nodes, answers, file, most_calls=settings.most_calls)
    flow = _TracedFlow(cfg, settings, transport, replay)
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
    return flow.to_trace(script)


def _locate_error(err: BaseException, line: int | None, examples: Examples) -> str:
    text = str(err)
    if isinstance(err, _UnknownMetric):
        text = (
            f"reads {err.args[0]!r}, which only a run knows, expected an example; declare it with "
            f"flow.assume({{{err.args[0]!r}: 0.5}}) at the top of main"
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


def _longest(cfg: Any) -> dict[str, int]:
    """Most tokens of rows that the settings allow."""
    data = next((part for _, part in parts_of(cfg, DataSettings)), None)
    rollout = next((part for _, part in parts_of(cfg, RolloutConfig)), None)
    prompts = data.max_prompt_tokens if data else 1
    return {PROMPTS: prompts, RESPONSES: rollout.max_new_tokens if rollout else 1}


class _TracedFlow(Flow):
    """The script's view of a run that does not run; `Flow` itself does all the work."""

    def __init__(
        self,
        cfg: Any,
        settings: TraceSettings,
        transport: TraceTransport,
        replay: Replay | None,
    ) -> None:
        self._trace_settings = settings
        self._transport = transport
        self._replay = replay
        caller = _TracedCaller(transport, cfg.run, settings.world)
        self._batches = caller.batches
        unwritten: Any = _Unwritten(settings.start)
        super().__init__(
            caller,
            cfg,
            pools_of(cfg, settings.world),
            Path(),
            unwritten,
            unwritten,
            backend=settings.backend,
        )

    def assume(self, examples: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Keep the script's examples."""
        self._transport.answers.examples.add({**(examples or {}), **more})

    def steps(self, total: int) -> Iterator[Step]:
        """The first steps of the run, or of its continuation."""
        settings = self._trace_settings
        first = int(settings.start["step"]) if settings.start else 0
        self.caller.old_log_probs.end_step(self._transport.answers.examples.metrics(), {})
        for step in super().steps(min(total, first + settings.num_steps)):
            self._transport.begin_step(step.number)
            self._transport.is_looking = True
            yield step
            self._transport.is_looking = False  # while the step ends
        self._transport.is_looking = True

    def report(self, greedy: Batch, sampled: Batch) -> dict[str, float]:
        """Reads the scores, as a run would; writes nothing."""
        for batch in (greedy, sampled):
            if len(batch):
                batch.fetch_for("filter", *(set(batch.columns) & {"scores"}))
        return {}

    def _finish(self, step: Step) -> None:
        super()._finish(step)
        if self._replay is not None:
            self.caller.old_log_probs.end_step(
                self._replay.metrics(step.number), self.caller.num_updates
            )
        self._transport.end_step(step.number, self.caller.transfers.planned_bytes)

    def _before_first_step(self) -> None:
        if self._trace_settings.with_evaluation:
            super()._before_first_step()

    def to_trace(self, script: ModuleType) -> Trace:
        """What was written down."""
        settings = self._trace_settings
        transport = self._transport
        answers = transport.answers
        guessed = sorted(answers.examples.guessed)
        return Trace(
            world=settings.world,
            nodes=tuple(settings.nodes[rank] for rank in settings.world),
            pools=self._pools,
            models=models_of(transport.orders, self._pools),
            links=links_of(transport.orders),
            orders=tuple(transport.orders),
            tokens=transport.tokens,
            steps=tuple(transport.steps),
            reads=tuple(_reads_of(script, transport)),
            assumptions=(
                *answers.notes,
                *answers.examples.used_text(),
                *(f"column {name}: float32, one a row" for name in guessed),
            ),
            edges_by_step=transport.edges,
            choices=tuple(self.caller.old_log_probs.choices.values()),
            batches=self._batches,
        )


class _Unwritten:
    """Stands for the flow's `Show` and `Saving`: a dry run shows, loads and writes nothing. It may
    start from the state of a run, without its weights."""

    def __init__(self, start: Mapping[str, Any] | None) -> None:
        self._start = start
        self.due = False
        self.ending = Ending(None, age=0.0)

    def resume(self, *_: object) -> dict[str, Any] | None:
        """The state that the run had."""
        if self._start is None:
            return None
        return dict(self._start)

    def save(self, *_: object) -> None:
        """Nothing is written."""
        self.due = False

    def show(self, *_: object, **__: object) -> None:
        """Nothing was measured."""

    step = spans = samples = finish = show


class _TracedCaller(Caller):
    """Writes down the rows of updates and the metrics that are read; `Caller` does all the work."""

    def __init__(self, transport: TraceTransport, run: RunConfig, ranks: tuple[int, ...]) -> None:
        super().__init__(transport, run, ranks)
        self._trace = transport
        self.batches: dict[int, tuple[Ids, Ids]] = {}
        """Row ids of the batch that each update was given, and their parents, by place."""

    def invoke(
        self,
        target: Target,
        method: str,
        given: Batch | list[Any] | None,
        arguments: Mapping[str, Any],
    ) -> Batch | Result:
        """As `Caller.invoke`."""
        made = super().invoke(target, method, given, arguments)
        if isinstance(given, Batch) and method_spec(target.worker_class, method).minibatches:
            label = f"{target.name}.{method}"
            order = next(o for o in reversed(self._trace.orders) if o.label == label)
            self.batches[order.place] = given.ids, given.parents
        if isinstance(made, Batch):
            return made
        return _WatchedResult(made, self._trace.use)

    def metrics_of(self, results: Iterable[RowResult]) -> Mapping[str, float]:
        """As `Caller.metrics_of`; the numbers are examples."""
        super().metrics_of(results)
        return _WatchedMetrics(self._trace.answers.examples.metrics(), self._trace.use)


class _UnknownMetric(KeyError):
    """A metric that the script reads and nobody has declared."""


class _WatchedMetrics(dict[str, float]):
    """Metrics that calls would have reported; those that the script reads count as used."""

    def __init__(self, metrics: Mapping[str, float], use: Callable[..., None]) -> None:
        super().__init__(metrics)
        self._use = use

    def __missing__(self, key: str) -> float:
        raise _UnknownMetric(key)

    def __getitem__(self, key: str) -> float:
        value = super().__getitem__(key)
        self._use(key)
        return value


class _WatchedResult(Result):
    """The answer of a call; the metrics that the script reads count as used."""

    def __init__(self, result: Result, use: Callable[..., None]) -> None:
        super().__init__(result.label, result.pending, result.ranks)
        self._use = use

    def metrics(self) -> dict[str, float]:
        """As `Result.metrics`."""
        metrics = super().metrics()
        self._use(*metrics)
        return metrics

    def __getitem__(self, key: str) -> float:
        return _WatchedMetrics(super().metrics(), self._use)[key]


_LOOPS = (ast.While, ast.For, ast.AsyncFor)


def _reads_of(script: ModuleType, transport: TraceTransport) -> list[Read]:
    """Every line that waited, once, with what it waited for; then loops that made calls."""
    inner = _inner_loops(Path(str(script.__file__)).read_text(encoding="utf-8"))
    found: dict[int, dict[str, None]] = {}
    waits = [lines for lines, _ in transport.waits]
    looping = set()
    for lines in waits:
        if any(_encloses(loop, lines) for loop in inner):
            looping.add(lines[0])
    for (line, *_), what in transport.waits:
        found.setdefault(line, {})[what] = None
    reads = [Read(line, ", ".join(what), line in looping) for line, what in sorted(found.items())]
    calls = set(transport.paths)
    for loop in inner:
        if loop.start not in found and any(_encloses(loop, lines) for lines in calls):
            what = f"loop over lines {loop.start}-{loop.stop - 1}"
            is_waiting = any(_encloses(loop, lines) for lines in waits)
            reads.append(Read(loop.start, what, True, waits=is_waiting))
    return reads


def _encloses(loop: range, lines: Lines) -> bool:
    return any(line in loop for line in lines)


def _inner_loops(text: str) -> list[range]:
    """Lines of all loops but those over the run's steps, and those that such a loop is in."""
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
