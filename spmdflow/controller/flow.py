"""`Flow`: what a script is given. It spawns models, counts steps, evaluates and saves.

Lives in the controller thread (single controller, paper section 4). Knows names, rows and
metrics; no tensors, no devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spmdflow.config.placement import Pool, pool_of
from spmdflow.config.schema import DataSettings
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.check import check_every
from spmdflow.controller.evaluation import Evaluated, Evaluation, Generate
from spmdflow.controller.group import (
    ResourcePool,
    WeightLink,
    WorkerGroup,
    make_groups,
    spawn_group,
)
from spmdflow.controller.prompts import PromptStream
from spmdflow.controller.saving import Saving
from spmdflow.controller.step import Counters, Show, Step, is_due
from spmdflow.controller.transcript import Transcript
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.transfer.worker import Metric, Worker

T = TypeVar("T")


@dataclass(frozen=True)
class FlowSettings:
    """What a flow needs to know besides the caller."""

    config: Any
    world: tuple[int, ...]
    pools: Mapping[str, Pool]
    run_dir: Path
    backend: str
    """Backend of compute-lane groups."""
    start_seconds: float
    has_outside: bool = False
    """Whether ranks outside the run help to make its groups, and wait for the last one."""
    transcript: Transcript | None = None
    """Told when steps begin and end."""


class Stopped(Exception):
    """The run was asked to stop; the step that was running is checkpointed."""


class Flow:
    """The script's view of the run."""

    def __init__(self, caller: Caller, settings: FlowSettings, saving: Saving, show: Show) -> None:
        self.caller, self._settings, self._saving, self._show = caller, settings, saving, show
        self.groups: dict[str, WorkerGroup] = {}
        self._links: list[WeightLink] = []
        self.kept: dict[str, Any] = {}
        self.step: Step | None = None
        self.stopped = False
        self._evaluation = Evaluation(caller, self._links, settings.config)
        self._first_evaluation: Evaluated | None = None
        self._before = Counters()

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._settings.config.run.seed

    # Models and things

    def pool(self, name: str) -> ResourcePool:
        """A pool of the placement, by name."""
        pools = self._settings.pools
        if name not in pools:
            raise ConfigError(
                f"pool {name!r}: the placement has {sorted(pools)}, expected one of them; "
                f"correct the name"
            )
        return ResourcePool(name, tuple(pools[name].ranks), self.spawn)

    def spawn(
        self,
        worker_class: type[Worker],
        cfg: Any,
        *,
        pool: ResourcePool | None = None,
        name: str | None = None,
    ) -> WorkerGroup:
        """Build a model and return its handle.

        Without a pool it goes where the placement puts its name, or else its role; a model without
        an engine shares the pool of the reward (config/placement.py).
        """
        if self.step is not None:
            raise ProtocolError(
                f"spawn {worker_class.__name__}: called during step {self.step.number}, expected "
                f"before the first step; spawn every model at the top of main"
            )
        name = name or worker_class.role
        if name in self.groups:
            raise ProtocolError(
                f"spawn {worker_class.__name__}: got the name {name!r}, expected one that is not "
                f"taken by {self.groups[name]}; give name=... for a second one"
            )
        group = spawn_group(
            self.caller,
            worker_class,
            cfg,
            pool=pool or self.pool(pool_of(self._settings.pools, name, worker_class.role, cfg)),
            name=name,
            world=self._settings.world,
            total_steps=self._settings.config.total_steps,
            backend=self._settings.backend,
            seconds=self._settings.start_seconds,
        )
        self.groups[name] = group
        return group

    def connect(self, policy: WorkerGroup, generator: WorkerGroup) -> WeightLink:
        """Join a policy to a generator on other ranks; `sync()` of the answer moves weights."""
        ranks = tuple(sorted({*policy.target.layout.ranks, *generator.target.layout.ranks}))
        settings = self._settings
        make_groups(
            self.caller,
            [ranks],
            world=settings.world,
            label=f"{policy.name}-{generator.name}",
            backend=settings.backend,
        )
        link = WeightLink(self.caller, policy, generator)
        self._links.append(link)
        return link

    def prompts(self, cfg: DataSettings, *, name: str = "prompts") -> PromptStream:
        """The prompts of a data section; `next(prompts)` is a batch for one step.

        Its place is part of checkpoints, under the name; a second stream gives another one.
        """
        if name in self.kept:
            raise ProtocolError(
                f"flow.prompts: got the name {name!r} besides {sorted(self.kept)}, expected a name "
                f"of its own; give name=... for a second stream"
            )
        return self.keep(
            **{
                name: PromptStream(
                    cfg,
                    self.caller,
                    name=name,
                    world=self._settings.world,
                    seed=self.seed,
                    log=self._log,
                )
            }
        )

    def keep(self, **things: T) -> T:
        """Register a thing with state_dict and load_state_dict, so that it resumes; returns it."""
        if len(things) != 1 or set(things) & set(self.kept):
            raise ProtocolError(
                f"keep: got {sorted(things)} besides {sorted(self.kept)}, expected one thing with "
                f"a name of its own; call it once for each"
            )
        ((name, thing),) = things.items()
        self.kept[name] = thing
        return thing

    def assume(self, examples: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Examples of what only a run knows, for `spmdflow.plan`; a run takes no notice.

        Name -> a number (of a metric, or of every row of a column), a list that rows take in
        turn, tokens (prompts, responses), a plain answer ("group.method"), or how a column looks
        ("float32 like responses"). Any: these. Metrics have slashes: assume({"actor/kl": 0.1}).
        """

    # Steps

    def steps(self, total: int) -> Iterator[Step]:
        """Steps 1 to total, resumable: a restarted run continues after its last checkpoint."""
        if self._settings.has_outside:
            rank = self._settings.world[0]
            self.caller.sender.submit("last.groups", {rank: {"operation": "groups", "specs": None}})
        last = self._resume()
        if last is None:
            self._before_first_step()
            last = 0
        for number in range(last + 1, total + 1):
            self.step = Step(number)
            self.caller.sender.step = number
            if self._settings.transcript is not None:
                self._settings.transcript.begin_step(number)
            yield self.step
            self._finish(self.step)
            if self.caller.sender.transport.stop_requested:
                self._stop(number)

    def evaluate(
        self,
        model: WorkerGroup,
        *others: WorkerGroup,
        every: int = 1,
        generate: Generate | None = None,
    ) -> None:
        """Evaluate a model on the held-out prompts, every so many steps (docs/EVALUATION.md).

        `flow.evaluate(actor, reward)`: the model responds greedily and the reward scores; samples
        too, if data.eval_prompts asks for them: pass@k and maj@n. A worker class with an
        `evaluation` judges the rows by that method alone; others: the groups whose columns it
        needs, such as the reference of `flow.evaluate(actor, reference)`.

        Called before the first step, it evaluates as step 0 when the steps begin, unless the run
        continues from a checkpoint.

        generate: the script's own way from held-out rows to rows with responses, such as several
        turns with a tool: generate(rows) -> rows. One that has a parameter `greedy` is told whether
        to sample.
        """
        check_every("evaluate", every)
        streams = [thing for thing in self.kept.values() if isinstance(thing, PromptStream)]
        evaluated = Evaluated(model, others, streams, generate)
        if self.step is not None:
            self.step.log(self._evaluation.run(self.step.number, evaluated, every=every))
        elif every:
            evaluated.stream()  # an error now if there are no held-out prompts
            self._first_evaluation = evaluated

    def report(self, greedy: Batch, sampled: Batch) -> dict[str, float]:
        """Estimates from scored responses to the held-out prompts, as metrics; waits for them.

        sampled: of the same prompts, or no rows. Prints a table and writes
        RUN_DIR/evaluation.jsonl.
        """
        return self._evaluation.report(greedy, sampled, self._settings.run_dir)

    def save(self, *, every: int = 1) -> None:
        """Write a checkpoint at the end of this step, every so many steps."""
        check_every("save", every)
        if self.step is not None and is_due(self.step.number, every):
            self._saving.due = True

    # Inside a step

    def _before_first_step(self) -> None:
        if self._first_evaluation is not None:
            self.step = Step(0)
            self.step.log(self._evaluation.run(0, self._first_evaluation, every=1))
            self._finish(self.step)

    def _log(self, metrics: Mapping[str, Metric]) -> None:
        if self.step is not None:
            self.step.log(metrics)

    def _finish(self, step: Step) -> None:
        """Wait for every call of the step, then write what it measured."""
        records = self.caller.sender.records
        for record in records:
            record.pending.result()
        transfers = self.caller.transfers.take_outstanding()
        for record in transfers:
            record.pending.result()
        metrics = self._metrics(step, records)
        self._show.step(step.number, metrics)
        if self._settings.transcript is not None:
            edges = self.caller.transfers.bytes
            self._settings.transcript.end_step(step.number, metrics, edges)
        self._show.spans([*records, *transfers])
        self._show.samples(step.number, self.caller.scored)
        self.caller.scored = None
        self.caller.sender.records = []
        if self._saving.due:
            self._save(step.number)

    def _metrics(self, step: Step, records: list[Any]) -> dict[str, float]:
        metrics = step.metrics(records)
        now = Counters.read(self.caller)
        metrics |= now.since(self._before)
        self._before = now
        return metrics

    # Checkpoints

    def _resume(self) -> int | None:
        state = self._saving.resume(self.caller, self.groups)
        if state is None:
            return None
        if self._settings.transcript is not None:
            self._settings.transcript.continue_from(state)
        self.caller.row_ids.next_id = state["next_id"]
        for name, saved in state["kept"].items():
            self.kept[name].load_state_dict(saved)
        return int(state["step"])

    def _save(self, number: int) -> None:
        kept = {
            name: thing.state_dict()
            for name, thing in self.kept.items()
            if hasattr(thing, "state_dict")
        }
        state = {"step": number, "next_id": self.caller.row_ids.next_id, "kept": kept}
        self._saving.save(number, self.caller, self.groups, state)

    def _stop(self, number: int) -> None:
        self._saving.due = True
        self._save(number)
        self.stopped = True
        raise Stopped(f"stopped after step {number}, which is checkpointed")
