"""Runs a script on no device and hands back what it asked of every rank."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdflow.config.leaf import parts_of
from spmdflow.config.placement import pools_of
from spmdflow.config.schema import DataSettings, RolloutConfig
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.flow import Flow, FlowSettings
from spmdflow.controller.frame import CallRecord
from spmdflow.controller.saving import Groups, Saving
from spmdflow.controller.sender import CallSettings
from spmdflow.controller.step import Show, Step
from spmdflow.controller.transfers import Transfers
from spmdflow.errors import SpmdflowError
from spmdflow.plan.answers import Answers, Lengths
from spmdflow.plan.example import DataFiles, Examples
from spmdflow.plan.record import Refusal, Trace, TracedModel
from spmdflow.plan.replay import Replay
from spmdflow.plan.transport import (
    MOST_CALLS,
    TracedCaller,
    TraceTransport,
    UnknownMetric,
    reads_of,
)


@dataclass(frozen=True)
class TraceSettings:
    """How to run a script dry."""

    world: tuple[int, ...]
    """Ranks of the run."""
    nodes: tuple[int, ...]
    """Machine of each rank of the cluster, by rank."""
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


def trace(
    script: ModuleType, cfg: Any, settings: TraceSettings, replay: Replay | None = None
) -> Trace:
    """Run script.main(flow, cfg) dry. Refusal, with the line, for what cannot be planned.

    Any: an object of the script's settings class.
    """
    examples = Examples(settings.examples, is_replayed=replay is not None)
    files = DataFiles(cfg, read_data=settings.read_data)
    answers = Answers(examples, _lengths(cfg), files.scan, replay or Replay())
    transport = TraceTransport(
        settings.nodes,
        answers,
        script_file=str(script.__file__),
        most_calls=settings.most_calls,
    )
    flow = _TracedFlow(cfg, settings, transport, examples)
    try:
        with _in_silence():
            script.main(flow, cfg)
    except (Exception, SystemExit) as err:
        line = _line_of(err, str(script.__file__))
        if line is None and not isinstance(err, SpmdflowError):
            raise  # no mistake of the script
        raise Refusal(_located(err, line, examples)) from err
    return flow.to_trace(files.notes, script)


@contextmanager
def _in_silence() -> Iterator[None]:
    """What the controller logs of a run is no news in a dry run; warnings are."""
    logger = logging.getLogger("spmdflow.controller")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def trace_replayed(script: ModuleType, cfg: Any, replay: Replay) -> Trace:
    """The steps of a run that a transcript has, with the run's own lengths and values."""
    return trace(script, cfg, settings_of_run(replay), replay)


def settings_of_run(replay: Replay, *, backend: str = "gloo") -> TraceSettings:
    """The ranks, machines and steps of a run that was."""
    nodes = replay.nodes
    return TraceSettings(
        world=replay.ranks,
        nodes=tuple(nodes.get(rank, 0) for rank in range(max(replay.ranks) + 1)),
        backend=backend,
        num_steps=max(replay.steps) - (int(replay.start["step"]) if replay.start else 0),
        start=replay.start,
        with_evaluation=0 in replay.steps,
        most_calls=MOST_CALLS + len(replay.orders),
        read_data=False,
    )


def _line_of(err: BaseException, file: str) -> int | None:
    """The script's line that was running."""
    lines = [f.lineno for f in traceback.extract_tb(err.__traceback__) if f.filename == file]
    return lines[-1] if lines else None


def _located(err: BaseException, line: int | None, examples: Examples) -> str:
    text = str(err)
    if isinstance(err, UnknownMetric):
        text = (
            f"reads {err.args[0]!r}, which only a run knows, expected an example; declare it with "
            f"flow.assume({{{err.args[0]!r}: 0.5}}) at the top of main"
        )
    elif not isinstance(err, SpmdflowError):
        seen = ", ".join(f"{name} = {value}" for name, value in sorted(examples.used.items()))
        text = (
            f"got {type(err).__name__}: {err}, expected main to run to the end of its steps on "
            f"examples ({seen or 'none was read'}); mend the line, or declare an example that it "
            f"can work with: flow.assume(name=value) at the top of main, or --assume name=value"
        )
    if line is None or text.startswith("script line"):
        return text
    return f"script line {line}: {text}"


def _lengths(cfg: Any) -> Lengths:
    data = next((part for _, part in parts_of(cfg, DataSettings)), None)
    rollout = next((part for _, part in parts_of(cfg, RolloutConfig)), None)
    return Lengths(
        prompts=data.max_prompt_tokens if data else 1,
        responses=rollout.max_new_tokens if rollout else 1,
    )


class _TracedFlow(Flow):
    """The script's view of a run that does not run; `Flow` itself does all the work."""

    def __init__(
        self, cfg: Any, settings: TraceSettings, transport: TraceTransport, examples: Examples
    ) -> None:
        self._trace_settings, self._transport, self._examples = settings, transport, examples
        self._cfg = cfg
        self._traced_steps: list[int] = []
        self._models: dict[str, TracedModel] = {}
        self._pairs: list[tuple[str, str]] = []
        transfers = Transfers(transport, seconds=cfg.run.transfer_seconds)
        limits = CallSettings(cfg.run.seed, cfg.run.call_seconds, settings.world)
        caller = self._traced_caller = TracedCaller(transport, transfers, limits, examples)
        pools = pools_of(cfg, settings.world)
        facts = FlowSettings(
            config=cfg,
            world=settings.world,
            pools=pools,
            run_dir=Path(),
            backend=settings.backend,
            start_seconds=cfg.run.start_seconds,
        )
        self._pools = pools
        self._edges: dict[int, dict[tuple[int, int], int]] = {}
        super().__init__(caller, facts, _NoSaving(settings.start), _Quiet())

    def assume(self, examples: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Keep the script's examples."""
        self._examples.add({**(examples or {}), **more})

    def spawn(self, worker_class: Any, cfg: Any, **place: Any) -> Any:
        """As `Flow.spawn`; the model is written down."""
        group = super().spawn(worker_class, cfg, **place)
        layout = group.target.layout
        pool = next((n for n, p in self._pools.items() if set(layout.ranks) <= set(p.ranks)), "")
        self._models[group.name] = TracedModel(group.name, worker_class, cfg, layout, pool)
        return group

    def connect(self, policy: Any, generator: Any) -> Any:
        """As `Flow.connect`; the pair is written down."""
        self._pairs.append((policy.name, generator.name))
        return super().connect(policy, generator)

    def steps(self, total: int) -> Iterator[Step]:
        """The first steps of the run, or of its continuation."""
        settings = self._trace_settings
        first = int(settings.start["step"]) if settings.start else 0
        for step in super().steps(min(total, first + settings.num_steps)):
            self._transport.begin_step(step.number)
            self._traced_steps.append(step.number)
            yield step

    def report(self, greedy: Batch, sampled: Batch) -> dict[str, float]:
        """The values are looked at, nothing is written."""
        for batch in (greedy, sampled):
            if len(batch):
                batch.fetch_for("filter", *(set(batch.columns) & {"scores"}))
        return {}

    def _before_first_step(self) -> None:
        if self._trace_settings.with_evaluation:
            super()._before_first_step()

    def _finish(self, step: Step) -> None:
        self._transport.is_looking = False
        super()._finish(step)
        self._transport.is_looking = True
        before = self._edges.values()
        planned = self.caller.transfers.bytes.planned
        self._edges[step.number] = {
            edge: size - sum(earlier.get(edge, 0) for earlier in before)
            for edge, size in planned.items()
        }

    def to_trace(self, notes: Sequence[str], script: ModuleType) -> Trace:
        """What was written down."""
        settings, transport = self._trace_settings, self._transport
        used = [f"{name} = {value}" for name, value in sorted(self._examples.used.items())]
        guessed = [f"column {name}: float32, one a row" for name in sorted(self._examples.guessed)]
        return Trace(
            world=settings.world,
            nodes=tuple(settings.nodes[rank] for rank in settings.world),
            pools=self._pools,
            models=self._models,
            links=tuple(self._pairs),
            orders=tuple(transport.orders),
            tokens=transport.tokens,
            edges=dict(self.caller.transfers.bytes.planned),
            steps=tuple(self._traced_steps),
            reads=tuple(reads_of(script, transport.waits, transport.paths)),
            assumptions=(*notes, *used, *guessed),
            edges_by_step={n: _moved(edges) for n, edges in self._edges.items()},
            batches=self._traced_caller.batches,
        )


def _moved(edges: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    return {edge: size for edge, size in edges.items() if size}


class _Quiet(Show):
    """Shows nothing and writes no file."""

    def __init__(self) -> None:
        pass

    def samples(self, step: int, scored: Batch | None) -> None:
        """None are fetched."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing was measured."""

    def spans(self, records: Sequence[CallRecord]) -> None:  # type: ignore[override]
        """Nothing took time."""


class _NoSaving(Saving):
    """No checkpoints: a dry run loads and writes nothing; it may start where a run did."""

    def __init__(self, start: Mapping[str, Any] | None) -> None:
        self._start, self.due = start, False

    def resume(self, caller: Caller, groups: Groups) -> dict[str, Any] | None:
        """The state that the run had; the weights are nowhere."""
        return None if self._start is None else dict(self._start)

    def save(self, step: int, caller: Caller, groups: Groups, state: Mapping[str, Any]) -> None:
        """Nothing is written."""
        self.due = False
