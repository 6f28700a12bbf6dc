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
from spmdflow.config.schema import DataConfig
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.check import check_every
from spmdflow.controller.evaluation import Evaluation, Generate
from spmdflow.controller.group import (
    ResourcePool,
    WeightLink,
    WorkerGroup,
    make_groups,
    spawn_group,
)
from spmdflow.controller.saving import Saving
from spmdflow.controller.step import Counters, Show, Step
from spmdflow.controller.transcript import Transcript
from spmdflow.datasets.scan import ScanReport
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.transfer.worker import Worker

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
        self._evaluation = Evaluation(caller, self.groups, self.kept, self._links, settings.config)
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

    def keep(self, **things: T) -> T:
        """Register a thing with state_dict and load_state_dict, so that it resumes; returns it."""
        if len(things) != 1 or set(things) & set(self.kept):
            raise ProtocolError(
                f"keep: got {sorted(things)} besides {sorted(self.kept)}, expected one thing with "
                f"a name of its own; call it once for each"
            )
        ((name, thing),) = things.items()
        if hasattr(thing, "bind"):
            thing.bind(self, name)
        self.kept[name] = thing
        return thing

    def assume(self, examples: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Examples of what only a run knows, for `spmdflow.plan`; a run takes no notice.

        Name -> a number (of a metric, or of every row of a column), a list that rows take in
        turn, tokens (prompts, responses), a plain answer ("group.method"), or how a column looks
        ("float32 like responses"). Any: these. Metrics have slashes: assume({"actor/kl": 0.1}).
        """

    def scan(self, name: str, cfg: DataConfig, path: object) -> ScanReport:
        """Have the controller's rank read data files once; waits for what it found.

        path: data.train_path or data.eval_path.
        """
        rank = self._settings.world[0]
        command = {"operation": "scan", "data": cfg, "path": path}
        replies = self.caller.sender.submit(f"{name}.scan", {rank: command}).result()
        report: ScanReport = replies[rank]["report"]
        return report

    def open_source(self, name: str, settings: Mapping[str, Any]) -> None:
        """Make a data file known to every rank."""
        command = {"operation": "source", "name": name, "settings": dict(settings)}
        ranks = self._settings.world
        self.caller.sender.submit(f"{name}.open", {rank: dict(command) for rank in ranks})

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

    def evaluate(self, *, every: int = 1, generate: Generate | None = None) -> None:
        """Generate greedily for the held-out prompts and score them, every so many steps.

        Also samples, if data.eval_prompts asks for them: pass@k and maj@n (docs/EVALUATION.md).
        Uses the kept prompts and the groups "reward" and "generator", or else "actor"; a worker
        class with an `evaluation` judges the held-out rows by that method instead. Before
        step 1 this happens by itself if `eval_every` is set.

        generate: the script's own way from held-out rows to rows with responses, such as several
        turns with a tool: generate(rows) -> rows. One that has a parameter `greedy` is told whether
        to sample. Called before the first step, this sets it for the evaluation before step 1 too,
        and evaluates nothing.
        """
        check_every("evaluate", every)
        if generate is not None:
            self._evaluation.use(generate)
            if self.step is None:
                return
        number = self.step.number if self.step else 0
        found = self._evaluation.run(number, every=every)
        if found and self.step is not None:
            self.step.log(found)

    def report(self, greedy: Batch, sampled: Batch) -> dict[str, float]:
        """Estimates from scored responses to the held-out prompts, as metrics; waits for them.

        sampled: of the same prompts, or no rows. Prints a table and writes
        RUN_DIR/evaluation.jsonl.
        """
        return self._evaluation.report(greedy, sampled, self._settings.run_dir)

    def save(self, *, every: int = 1) -> None:
        """Write a checkpoint at the end of this step, every so many steps."""
        check_every("save", every)
        if every and self.step is not None and self.step.number % every == 0:
            self._saving.due = True

    # Inside a step

    def _before_first_step(self) -> None:
        if getattr(self._settings.config, "eval_every", 0):
            self.step = Step(0)
            self.evaluate()
            self._finish(self.step)

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
