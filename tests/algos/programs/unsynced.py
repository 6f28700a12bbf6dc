"""Trains from a queue, and leaves it to the queue to sync: the script does not.

The generator is busy with rows of later steps until it is halted, as if they had no end. The second
step trains two batches. With run.metrics_port the last step begins with a scrape of the run's own
page: RUN_DIR/scraped.txt.
"""

from __future__ import annotations

import urllib.request
from pathlib import Path
from queue import SimpleQueue

from spmdflow import (
    ActorConfig,
    Flow,
    GeneratorWorker,
    GRPOAsyncConfig,
    PolicyWorker,
    RewardWorker,
    WorkerContext,
    compute_advantages,
    concatenate,
    register,
)

LIMIT_SECONDS = 120.0
"""Only for a generator that is never halted."""


class Tireless(GeneratorWorker):
    """Draws ahead until it is halted, and not only until all rows have ended."""

    def __init__(self, cfg: ActorConfig, context: WorkerContext) -> None:
        super().__init__(cfg, context)
        self._halted_turns: SimpleQueue[int] = SimpleQueue()

    @register(transfer_mode="ONE_TO_ALL")
    def go_on(self, turn: int) -> None:
        """A turn that does not end by itself."""
        super().go_on(turn)
        while self._halted_turns.get(timeout=LIMIT_SECONDS) < turn:
            pass

    def halt(self, turn: int) -> None:
        """See Worker.halt."""
        super().halt(turn)
        self._halted_turns.put(turn)


def scrape(run_dir: Path) -> None:
    """Ask the page for Prometheus, as its server does, and keep what it says."""
    url = (run_dir / "metrics-url").read_text().strip()
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=LIMIT_SECONDS) as reply:
        (run_dir / "scraped.txt").write_bytes(reply.read())


def main(flow: Flow, cfg: GRPOAsyncConfig) -> None:
    actor = flow.spawn(PolicyWorker, cfg.actor)
    generator = flow.spawn(Tireless, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weights = flow.connect(actor, generator)
    queue = flow.queue(prompts, weights, max_staleness=cfg.max_staleness)

    for step in flow.steps(cfg.total_steps):
        if step.number == cfg.total_steps and cfg.run.metrics_port is not None:
            scrape(Path(cfg.run.dir))
        batch = next(queue)
        if step.number == 2:
            batch = concatenate([batch, next(queue)])
        batch |= actor.compute_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
        flow.save(every=cfg.save_every)
