"""Trains from a queue as its settings say, and writes what each step was given and learnt.

RUN_DIR/rows/step-N.pt has a dict for each batch: the ids and columns of its rows, and the metrics
of its update. Ahead of the run the generator takes a fixed number of steps of its own, so rows are
unfinished at every sync, and a run repeats bit for bit. With `kill` a rank kills the whole run, or
itself, at a chosen moment. The functions are also those of queue_episodes.py.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import torch
from torch import Tensor

from spmdflow import (
    Batch,
    Flow,
    GeneratorWorker,
    GRPOAsyncConfig,
    PolicyWorker,
    RewardWorker,
    WorkerContext,
    compute_advantages,
    compute_rollout_weights,
    register,
)
from spmdflow.config.leaf import setting
from spmdflow.data.ragged import is_ragged, rows_of
from spmdflow.episodes.run import EpisodeRunner

FEW = 3
"""Steps of the generator in a turn."""
LIMIT_SECONDS = 300.0
"""Only for a generator that is never halted."""
COLUMNS = (
    *("prompts", "responses", "response_mask", "rollout_log_probs", "token_versions"),
    *("old_log_probs", "scores", "advantages", "prompt_text"),
)
SOMETIMES = ("rollout_weights", "row_weights", "valid", "num_turns")
"""Columns that a batch has only with some settings."""


@dataclass
class QueueRowsConfig(GRPOAsyncConfig):
    """grpo_async.py's settings, and how its queue is used."""

    calls: list[int] = setting("How often a step calls next(queue): the steps in turn.", [1])
    batches_per_step: int = setting("What the queue is told.", 1, at_least=1)
    kill: str = setting(
        "run:0:script:7 kills the run at the 7th moment of rank 0 in its script; rank instead of "
        "run: the rank alone. Other kinds are draw (steps of the generator) and file (files of "
        "checkpoints that are opened or renamed).",
        "",
    )


class Moments:
    """Counts moments of this rank by kind, and kills at the chosen one."""

    def __init__(self, rank: int, run_dir: Path, kill: str) -> None:
        """kill: as the setting says; empty: nothing is killed."""
        self._counts: Counter[str] = Counter()
        self._run_dir = run_dir
        who, where, self._kind, number = (kill or "::none:0").split(":")
        self._kills_run = who == "run"
        self._number = int(number) if where == str(rank) else 0
        if self._kind == "file" and self._number:
            sys.addaudithook(self._look_at_file)

    def reach(self, kind: str) -> None:
        """Count a moment; does not return from the chosen one."""
        if kind != self._kind:
            return
        self._counts[kind] += 1
        if self._counts[kind] == self._number:
            self._kill()

    def _kill(self) -> None:
        """Kill the agent and all ranks, or this rank; RUN_DIR/killed.jsonl has all processes."""
        own = psutil.Process()
        agent = own.parent()
        assert agent is not None
        everyone = [agent, *agent.children(recursive=True)]
        with open(self._run_dir / "killed.jsonl", "a") as file:
            print(json.dumps([[each.pid, each.create_time()] for each in everyone]), file=file)
        others = [agent, *agent.children()] if self._kills_run else []
        for each in [each for each in others if each != own] + [own]:
            each.kill()

    def _look_at_file(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count what opens or renames a file of a checkpoint."""
        if event in ("open", "os.rename") and "/checkpoints/" in str(arguments[0]):
            self.reach("file")


class SteadyGenerator(GeneratorWorker):
    """Takes FEW steps in a turn ahead of the run, however long that lasts, and waits for its end.

    So it would wait for ever in a run that waits for rows of later steps.
    """

    role = "generator"

    def __init__(self, cfg: Any, context: WorkerContext) -> None:
        super().__init__(cfg, context)
        self._halted_turns: SimpleQueue[int] = SimpleQueue()

    @register(transfer_mode="ONE_TO_ALL")
    def watch_moments(self, run_dir: str, kill: str) -> None:
        """Count the steps of the generator and files of this rank."""
        moments = Moments(self.context.rank, Path(run_dir), kill)
        step = self.requests.step

        def counted_step(*, greedy: bool = False) -> list[Any]:
            moments.reach("draw")
            return step(greedy=greedy)

        self.requests.step = counted_step  # type: ignore[method-assign]

    @register(transfer_mode="ONE_TO_ALL")
    def go_on(self, turn: int) -> None:
        """Take FEW steps in which the generator has rows, or as many as there are."""
        if self._runner is None:
            for _ in range(FEW):
                if len(self.requests):
                    self.rows_ahead._step_requests()
        else:
            self._play_on(self._runner)
        while self._halted_turns.get(timeout=LIMIT_SECONDS) < turn:
            pass

    def halt(self, turn: int) -> None:
        """See Worker.halt."""
        self._halted_turns.put(turn)

    def _play_on(self, runner: EpisodeRunner) -> None:
        """Take FEW steps in which episodes wait for replies, or as many as there are."""
        num_steps = 0

        def is_over() -> bool:
            nonlocal num_steps
            num_steps += len(self.requests) > 0
            return num_steps > FEW or not runner.num_under_way

        runner.run_until(is_over)


def plain(values: Any) -> list[Any]:
    """A column as a list of rows."""
    if not isinstance(values, Tensor):
        return list(values)
    return [row.clone() for row in rows_of(values)] if is_ragged(values) else list(values.unbind())


def found_of(drawn: Batch, batch: Batch, metrics: Any) -> dict[str, Any]:
    """What to write of a batch and its update. drawn: as the queue returned it."""
    names = [*COLUMNS, *(name for name in SOMETIMES if name in batch.refs)]
    columns = {name: plain(values) for name, values in batch.fetch(*names).items()}
    ids: dict[str, Any] = {
        "drawn": drawn.ids.tolist(),
        "ids": batch.ids.tolist(),
        "parents": batch.parents.tolist(),
    }
    return ids | columns | {"metrics": dict(metrics)}


def train(flow: Flow, cfg: Any) -> None:
    """Each batch of a step is an update; the step syncs once, behind all of them."""
    plays = getattr(cfg.actor.rollout, "episode", None) is not None
    actor = flow.spawn(PolicyWorker, cfg.actor)
    generator = flow.spawn(SteadyGenerator, cfg.actor)
    reward = None if plays else flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weights = flow.connect(actor, generator)
    queue = flow.queue(
        prompts, weights, max_staleness=cfg.max_staleness, batches_per_step=cfg.batches_per_step
    )
    run_dir = Path(cfg.run.dir).absolute()
    generator.watch_moments(run_dir=str(run_dir), kill=cfg.kill)
    moments = Moments(0, run_dir, cfg.kill)
    folder = run_dir / "rows"

    for step in flow.steps(cfg.total_steps):
        batches = []
        for _ in range(cfg.calls[(step.number - 1) % len(cfg.calls)]):
            moments.reach("script")
            drawn = next(queue)
            batch = drawn.segments() if plays else drawn
            batch |= actor.compute_log_prob(batch)
            if cfg.actor.update.old_log_probs == "recompute":
                batch |= batch.map(compute_rollout_weights, cfg=cfg.correction)
            if reward is not None:
                batch |= reward.compute_reward(batch)
            batch |= batch.map(
                compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage
            )
            batches.append((drawn, batch))
        moments.reach("script")
        found = []
        for drawn, batch in batches:
            metrics = actor.update_actor(batch)
            step.log(metrics)
            found.append(found_of(drawn, batch, metrics))
        moments.reach("script")
        folder.mkdir(exist_ok=True)
        torch.save(found, folder / f"step-{step.number}.pt")
        weights.sync()
        moments.reach("script")
        flow.save(every=cfg.save_every)


def main(flow: Flow, cfg: QueueRowsConfig) -> None:
    train(flow, cfg)
