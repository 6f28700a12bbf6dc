"""`Flow`: what a script is given. It spawns models, counts steps, evaluates and saves.

Lives in the controller thread (single controller, paper section 4). Knows names, rows and
metrics; no tensors, no devices.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spmdflow.checkpoint.manifest import CheckpointInfo, check_plain
from spmdflow.config.placement import Pool, pool_name_of
from spmdflow.config.schema import DataSettings
from spmdflow.controller.assignment import Target
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.evaluation import Evaluation, Generate
from spmdflow.controller.group import ResourcePool, WeightLink, WorkerGroup
from spmdflow.controller.guarding import Guarding
from spmdflow.controller.observer import Observer, StepRecord
from spmdflow.controller.old_log_probs import OldLogProbs, readers_of
from spmdflow.controller.on_demand import can_wait
from spmdflow.controller.planning import script_line
from spmdflow.controller.prompts import MAIN_STREAM, PromptStream, no_held_out_prompts
from spmdflow.controller.queue import RolloutQueue
from spmdflow.controller.saving import Saving
from spmdflow.controller.step import HostMemory, Show, Step, counted_bytes, device_metrics, is_due
from spmdflow.errors import CheckpointError, ConfigError, ProtocolError
from spmdflow.failure.cause import error_context
from spmdflow.message import name_of
from spmdflow.worker_api.metric import Metric
from spmdflow.worker_api.worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Stopped(Exception):
    """The run ends before its last step and can be continued."""

    is_time_up = False
    """Because of run.max_seconds: the processes have ended as they should."""


class Flow:
    """The script's view of the run."""

    def __init__(
        self,
        caller: Caller,
        config: Any,
        pools: Mapping[str, Pool],
        run_dir: Path | None,
        saving: Saving,
        show: Show | None,
        *,
        backend: str,
        has_outside: bool = False,
        guarding: Guarding | None = None,
        observers: Sequence[Observer] = (),
        stop_after: int | None = None,
        evaluates_first: bool = True,
    ) -> None:
        """config: the script's settings. backend: of compute-lane groups.

        run_dir, show: None in a dry run, which writes and prints nothing. has_outside: whether
        ranks outside of the run help to make its groups, and wait for the last one. guarding: the
        guards of the run. stop_after: the last step of this launch, if that is not the script's.
        evaluates_first: whether an evaluation before the first step is made.
        """
        self.caller = caller
        self._config = config
        self._pools = pools
        self._run_dir = run_dir
        self._saving = saving
        self._show = show
        self._backend = backend
        self._has_outside = has_outside
        self.groups: dict[str, WorkerGroup] = {}
        """Models that were built, by name."""
        self.spawned: dict[str, WorkerGroup] = {}
        """All models, also those that are built when something needs them."""
        self._links: list[WeightLink] = []
        self.kept: dict[str, Any] = {}
        self._guarding = guarding
        self._memory = HostMemory()
        self._observers = tuple(observers)
        self._stop_after = stop_after
        self._evaluates_first = evaluates_first
        self.step: Step | None = None
        self._is_step_open = False
        """Whether the script is inside of `step`."""
        self._evaluation = Evaluation(caller, self._links, config)
        caller.old_log_probs = OldLogProbs(readers_of(config))
        self._first_evaluation: Callable[[int], dict[str, float]] | None = None
        self._first_evaluation_line = ""
        self._counted: Counter[str] = Counter()
        self._metrics: Mapping[str, float] = {}
        for observer in self._observers:
            observer.attach(self)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._config.run.seed

    # Models and things

    def pool(self, name: str) -> ResourcePool:
        """Return a pool of the placement by name; ConfigError if there is none of this name."""
        if name not in self._pools:
            raise ConfigError(
                f"pool {name!r}: the placement has {sorted(self._pools)}, expected one of them; "
                f"correct the name"
            )
        return ResourcePool(name, tuple(self._pools[name].ranks), self.spawn)

    def spawn(
        self,
        worker_class: type[Worker],
        cfg: Any,
        *,
        pool: ResourcePool | None = None,
        name: str | None = None,
    ) -> WorkerGroup:
        """Build a model on the ranks of a pool, and return its handle without waiting.

        A reference whose log-probs no setting needs is built when something first reads them
        (on_demand.py). Without a pool the model goes where the placement puts its name, or else its
        role; a model without an engine shares the pool of the reward (config/placement.py).

        name: by default the role. Every rank of the run helps to make its process groups.
        ProtocolError once a step has begun, or if the name is taken.
        """
        if self.step is not None:
            raise ProtocolError(
                f"spawn {worker_class.__name__}: called during step {self.step.number}, expected "
                f"before the first step; spawn every model at the top of main"
            )
        name = name or worker_class.role
        if name in self.spawned:
            raise ProtocolError(
                f"spawn {worker_class.__name__}: got the name {name!r}, expected one that is not "
                f"taken by {self.spawned[name]}; give name=... for a second one"
            )
        pool = pool or self.pool(pool_name_of(self._pools, name, worker_class.role, cfg))
        layout = worker_class.layout_of(cfg, pool.ranks)
        seconds = self._config.run.start_seconds
        needed = worker_class.needed_groups(cfg, layout)
        hosts = worker_class.host_groups(cfg, layout)
        self._make_groups(name, needed, hosts, seconds=seconds)
        command = {
            "operation": "spawn",
            "name": name,
            "class": name_of(worker_class),
            "config": cfg,
            "layout": asdict(layout),
            "total_steps": self._config.total_steps,
            "nodes": self.caller.nodes(),
        }
        commands = {}
        for rank in pool.ranks:
            commands[rank] = dict(command)
        group = WorkerGroup(self.caller, Target(name, worker_class, layout, cfg))
        self.spawned[name] = group

        def build() -> None:
            """Have the pool's ranks build the model; do not wait for them."""
            self.caller.submit(f"{name}.spawn", commands, seconds=seconds)
            self.groups[name] = group

        if can_wait(worker_class, self._config):
            self.caller.on_demand.add(name, build)
        else:
            build()
        return group

    def connect(self, policy: WorkerGroup, generator: WorkerGroup) -> WeightLink:
        """Connect a policy to a generator on other ranks; `sync()` of the result copies weights.

        Every rank of the run helps to make the process group of the ranks of both. ConfigError if
        the two share ranks.
        """
        ranks = tuple(sorted({*policy.target.layout.ranks, *generator.target.layout.ranks}))
        self._make_groups(f"{policy.name}-{generator.name}", [ranks], [ranks])
        link = WeightLink(self.caller, policy, generator)
        self._links.append(link)
        return link

    def _make_groups(
        self,
        label: str,
        groups: Sequence[tuple[int, ...]],
        hosts: Sequence[tuple[int, ...]] = (),
        *,
        seconds: float | None = None,
    ) -> None:
        """Have every rank of the run make process groups of the compute lane; do not wait for them.

        groups: the ranks of groups with the run's backend. hosts: the ranks of gloo groups, for
        data in host memory. Equal groups are made once, and a group of one rank is not made.
        seconds: time limit.
        """
        ranks_and_backends = dict.fromkeys(
            [(g, self._backend) for g in groups] + [(g, "gloo") for g in hosts]
        )
        specs = []
        for ranks, backend in ranks_and_backends:
            if len(ranks) > 1:
                specs.append([list(ranks), "compute", backend])
        command = {"operation": "groups", "specs": specs}
        commands = {}
        for rank in self.caller.ranks:
            commands[rank] = dict(command)
        self.caller.submit(f"{label}.groups", commands, seconds=seconds)

    def prompts(self, cfg: DataSettings, *, name: str = MAIN_STREAM) -> PromptStream:
        """Return the prompts of a data section; `next(prompts)` is a batch for one step.

        Waits until rank 0 has read the files. Its position is saved in checkpoints under `name`. A
        second stream needs another name, and has an order of its own. ProtocolError if the name is
        taken.
        """
        if name in self.kept:
            got = f"the name {name!r} besides {sorted(self.kept)}"
            do = "give name=... for a second stream"
            raise ProtocolError.of("flow.prompts", got, "a name of its own", do)
        stream = PromptStream(cfg, self.caller, name=name, seed=self.seed, log=self._log)
        return self.keep(**{name: stream})

    def queue(
        self,
        prompts: PromptStream,
        weights: WeightLink,
        *,
        max_staleness: int,
        batches_per_step: int = 1,
    ) -> RolloutQueue:
        """Responses that are begun up to max_staleness steps ahead; `next(queue)` is one batch.

        weights: of `connect`, whose generator draws. batches_per_step: how often every step calls
        `next(queue)`, at least. A step may call it more often. Checkpoints have its state.
        """
        queue = RolloutQueue(
            prompts,
            weights,
            self.caller,
            max_staleness=max_staleness,
            batches_per_step=batches_per_step,
        )
        return self.keep(**{f"{weights.generator.name}.queue": queue})

    def keep(self, **things: T) -> T:
        """Save and load an object with checkpoints under its keyword's name; return the object.

        keep(name=thing). Its state_dict() is JSON data, and load_state_dict restores it when the
        steps begin. An object without state_dict is not saved. ProtocolError unless there is
        exactly one object under a new name, or if it has state_dict but no load_state_dict.
        """
        if len(things) != 1 or set(things) & set(self.kept):
            got = f"{sorted(things)} besides {sorted(self.kept)}"
            expected = "one thing with a name of its own"
            raise ProtocolError.of("keep", got, expected, "call it once for each")
        ((name, thing),) = things.items()
        if hasattr(thing, "state_dict") and not hasattr(thing, "load_state_dict"):
            raise ProtocolError(
                f"keep: {name} is a {type(thing).__name__} with state_dict, but without "
                f"load_state_dict, so a run that resumes could not load it; add it"
            )
        self.kept[name] = thing
        return thing

    def assume(self, examples: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Examples of values that only a run knows, for `spmdflow.plan`; ignored by a run.

        Name -> a number (of a metric, or of every row of a column), a list that rows take in
        turn, tokens (prompts, responses), a plain answer ("group.method"), or how a column looks
        ("float32 like responses"). Any: these. Metrics have slashes: assume({"actor/kl": 0.1}).
        """
        for observer in self._observers:
            observer.assume({**(examples or {}), **more})

    # Steps

    def steps(self, total: int) -> Iterator[Step]:
        """Yield steps 1 to total; a restarted run continues after its last checkpoint.

        First loads that checkpoint or, without one, makes the evaluation that the script asked for
        before its steps. After each step collects and shows metrics, and begins a checkpoint if one
        is due. Raises Stopped if a signal has asked the run to end, or if run.max_seconds leaves no
        time for another step.
        """
        if self._has_outside:
            command = {"operation": "groups", "specs": None}
            self.caller.submit("last.groups", {self.caller.ranks[0]: command})
        self.caller.transport.on_stop(self._saving.ending.ask)
        last = self._resume()
        if last is None:
            self._before_first_step()
            last = 0
        self._expect_steps(total)
        if self._stop_after is not None:
            total = min(total, self._stop_after)
        self.caller.last_step = total
        for observer in self._observers:
            observer.begin_steps(last + 1, total)
        if last < total and self.caller.transport.stop_requested:
            raise Stopped(f"stopped before step {last + 1}: no step has run since the start")
        for number in range(last + 1, total + 1):
            for observer in self._observers:
                observer.begin_step(number)
            self.step = Step(number)
            self.caller.step = number
            self._saving.ending.begin_step()
            self._is_step_open = True
            yield self.step
            self._end_step(self.step)
            self._saving.ending.end_step()
            if number < total and self._saving.ending.is_due():
                self._stop(f"run.max_seconds: step {number} is the last one in time")
            if self.caller.transport.stop_requested:
                self._stop(f"stopped after step {number}", is_time_up=False)

    def _expect_steps(self, total: int) -> None:
        """Note how many steps the script takes; log it if total_steps in the settings differs.

        Updates tell it to the ranks, whose learning-rate schedules end with the last step.
        """
        self.caller.total_steps = total
        planned = self._config.total_steps
        if total != planned:
            logger.info(
                "flow.steps: the script takes %d steps, total_steps is %d: schedules of learning "
                "rates end with the script's",
                total,
                planned,
            )

    def _stop(self, why: str, *, is_time_up: bool = True) -> None:
        """Save the running step if there is time for it, wait until it is saved, and raise Stopped.

        why: start of its message, which also says whether the step is checkpointed. is_time_up:
        whether the run ends because of run.max_seconds, which is no failure.
        """
        assert self.step is not None
        saving = self._saving
        if saving.ending.can_save():
            self._save(self.step.number)
        saving.finish()
        if saving.has(self.step.number):
            stopped = Stopped(f"{why}; it is checkpointed")
        else:
            stopped = Stopped(
                f"{why}; saving it takes about {saving.ending.save_seconds:.0f} s, longer than "
                f"until torchrun kills all ranks: the next start continues from the last checkpoint"
            )
        stopped.is_time_up = is_time_up
        raise stopped

    def evaluate(
        self,
        model: WorkerGroup,
        *others: WorkerGroup,
        every: int = 1,
        generate: Generate | None = None,
    ) -> None:
        """Evaluate a model on the held-out prompts, every so many steps (docs/EVALUATION.md).

        `flow.evaluate(actor, reward)`: the model responds greedily and the reward scores. If
        data.eval_samples asks for samples, it also samples and reports pass@k and maj@n. A worker
        class with an `evaluation` judges the rows by that method alone; `others` are then the
        groups whose columns it needs, such as the reference of `flow.evaluate(actor, reference)`.

        Called before the first step, it evaluates as step 0 when the steps begin, unless the run
        continues from a checkpoint. Inside a step its metrics are logged. Does nothing with
        every=0.

        generate: the script's own generation, such as several turns with a tool: generate(rows) ->
        rows with responses. If it has a parameter `greedy`, it is told whether to decode greedily.
        ConfigError without held-out prompts, ProtocolError if `every` is no number of steps.
        """
        _check_every("evaluate", every)
        if not every or (self.step is not None and not is_due(self.step.number, every)):
            return
        held_out = []
        for thing in self.kept.values():
            if isinstance(thing, PromptStream) and thing.eval_scan is not None:
                held_out.append(thing)
        if not held_out:
            raise no_held_out_prompts()
        evaluate = partial(self._evaluation.run, held_out[0], model, others, generate)
        if self.step is not None:
            self.step.log(evaluate(self.step.number))
        else:
            self._first_evaluation = evaluate
            self._first_evaluation_line = f"{script_line()}, for the evaluation before step 1"

    def report(self, greedy: Batch, sampled: Batch) -> dict[str, float]:
        """Estimates from scored responses to the held-out prompts, as metrics; waits for them.

        sampled: of the same prompts, or no rows. Prints a table and writes
        RUN_DIR/evaluation.jsonl.
        """
        return self._evaluation.report(greedy, sampled, self._run_dir)

    def save(self, *, every: int = 1) -> None:
        """Write a checkpoint at the end of this step, every so many steps.

        The last step of a run that trains is saved in any case, unless run.save_last=false.
        """
        _check_every("save", every)
        if self.step is not None and every:
            self._saving.due |= is_due(self.step.number, every)

    def end(self) -> None:
        """End the run after main: end a step that main left early, and save the last one.

        Does nothing if no step has begun. Saves only if this launch has trained something and
        run.save_last is true. Not for scripts: `spmdflow.run` calls it.
        """
        if self.step is None or not self.step.number:
            return
        if self._is_step_open:
            self._end_step(self.step)
        if self._saves_last():
            self._save(self.step.number)

    # Inside a step

    def _before_first_step(self) -> None:
        """Make the evaluation that the script asked for before its steps, as step 0, and show it.

        Does nothing if the script asked for none, or if the launch makes none before its first
        step.
        """
        if self._first_evaluation is not None and self._evaluates_first:
            self.step = Step(0)
            self.caller.line = self._first_evaluation_line  # the script is at flow.steps(...) now
            try:
                self.step.log(self._first_evaluation(0))
            finally:
                self.caller.line = None
            self._finish(self.step)

    def _log(self, metrics: Mapping[str, Metric]) -> None:
        if self.step is not None:
            self.step.log(metrics)

    def _end_step(self, step: Step) -> None:
        """End a step that the script has left: tell the observers, then `_finish` it."""
        self._is_step_open = False
        for observer in self._observers:
            observer.end_script(step.number)
        with error_context(f"ending step {step.number}"):
            self._finish(step)

    def _saves_last(self) -> bool:
        """Return whether the last step is saved although the script does not ask for it.

        It is if run.save_last is true and this launch has made an update, or a custom worker class
        saves a state of its own.
        """
        if not self._config.run.save_last:
            return False
        return self.caller.num_updates.total() > 0 or any(
            _has_own_state(group.target.worker_class) for group in self.groups.values()
        )

    def _finish(self, step: Step) -> None:
        """Wait for every call of a step, record its metrics and samples, and save it if due.

        Halts generation ahead of the step, passes a StepRecord to the observers, and asks the
        guards; GuardError if one ends the run, and then the step is not saved. Forgets the step's
        calls. The last step of a run that trains is saved in any case.
        """
        caller = self.caller
        for link in self._links:
            link.halt()
        records = caller.records
        transfers = [pending.record() for pending in caller.transfers.take_outstanding()]
        counted = counted_bytes(caller)
        before = self._counted
        self._metrics = metrics = step.metrics(records)
        metrics |= {name: float(count - before[name]) for name, count in counted.items()}
        metrics |= self._memory.metrics(records)
        metrics |= device_metrics(records)
        if self._guarding is not None:
            metrics |= self._guarding.metrics()
        self._counted = counted
        caller.old_log_probs.end_step(metrics, caller.num_updates)
        if self._show is not None:
            self._show.step(step.number, metrics)
        record = StepRecord(
            step.number,
            records,
            transfers,
            metrics,
            caller.transfers.planned_bytes,
            caller.transfers.moved_bytes,
        )
        for observer in self._observers:
            observer.end_step(record)
        if self._show is not None:
            self._show.samples(step.number, caller.scored, caller.learnt)
        if self._guarding is not None:
            self._guarding.end_step(step.number, metrics)
        caller.scored = {}
        caller.calls = []
        caller.uses.clear()
        self._saving.finish(wait=False)
        is_last = 0 < step.number == caller.last_step
        if self._saving.due or (is_last and self._saves_last()):
            self._save(step.number)

    # Checkpoints

    def _resume(self) -> int | None:
        """Load the checkpoint that the run continues from; return its step, None without one.

        Restores the models, the next row id, the guards and every kept object, and tells the
        observers.
        """
        state = self._saving.resume(self.caller, self.groups)
        if state is None:
            return None
        for observer in self._observers:
            observer.continue_from(state)
        self.caller.row_ids.next_id = state["next_id"]
        self.caller.old_log_probs.mismatch = state.get("drift", ())
        if self._guarding is not None and "guards" in state:
            self._guarding.load_state_dict(state["guards"])
        self._load_kept(state["kept"])
        return int(state["step"])

    def _load_kept(self, saved: Mapping[str, Any]) -> None:
        """Load the saved state of every kept object. saved: state by name.

        CheckpointError if the script no longer keeps an object that has a saved state. Warns if a
        kept object has no saved state; it starts as it was made.
        """
        lost = sorted(name for name in saved if saved[name] and name not in self.kept)
        if lost:
            raise CheckpointError(
                f"flow.keep: the checkpoint of this run has the state of {', '.join(lost)}, but "
                f"the script keeps only {', '.join(sorted(self.kept)) or 'nothing'}; keep it again "
                f"under the same name, or start another run from RUN_DIR/export with another "
                f"run.dir"
            )
        for name, thing in self.kept.items():
            if name in saved:
                thing.load_state_dict(saved[name])
            elif hasattr(thing, "state_dict"):
                logger.warning(
                    "warning: the checkpoint has no state of %r, which the script keeps now: it "
                    "starts as it was made",
                    name,
                )

    def replay(self, checkpoint: CheckpointInfo) -> None:
        """Continue from this checkpoint, for one step (spmdflow.replay)."""
        self._saving.resumed_from = checkpoint
        self._stop_after = checkpoint.step + 1

    def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written is sealed."""
        self._saving.finish()

    def _save(self, number: int) -> None:
        with error_context(f"saving step {number}"):
            self._saving.save(number, self.caller, self.groups, self.state(number), self._metrics)

    def state(self, number: int) -> dict[str, Any]:
        """Return what a run needs, besides the models, to continue after step `number`: JSON data.

        It has the step, the next row id, the states of the kept objects, the last mismatch of
        generator and trainer, and the state of the guards. It is a copy, because another thread
        writes it to disk while the script changes what it keeps. CheckpointError if a state is not
        JSON data.
        """
        kept = {}
        for name, thing in self.kept.items():
            if hasattr(thing, "state_dict"):
                kept[name] = thing.state_dict()
        state = {"step": number, "next_id": self.caller.row_ids.next_id, "kept": kept}
        state["drift"] = list(self.caller.old_log_probs.mismatch)
        if self._guarding is not None:
            state["guards"] = self._guarding.state_dict()
        check_plain(state, "flow")
        copy: dict[str, Any] = json.loads(json.dumps(state))
        return copy


def _has_own_state(worker_class: type[Worker]) -> bool:
    """Whether a worker class of the user's own saves a state, which only it knows how to change."""
    return not worker_class.save_state.__module__.startswith("spmdflow.")


def _check_every(what: str, every: object) -> None:
    """ProtocolError unless `every` is an integer of at least 0."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ProtocolError(
            f"flow.{what}: got every={every!r}, expected a number of steps (0: never); write "
            f"flow.{what}(..., every=cfg.{'eval' if what == 'evaluate' else what}_every)"
        )
