"""Trains from a queue, and leaves it to the queue to sync: the script does not.

The generator is busy with rows of later steps until it is halted, as if they had no end. The script
reads what other calls make on the generator's ranks meanwhile.
"""

from __future__ import annotations

from queue import SimpleQueue

import torch
from tensordict import TensorDict

from spmdflow import (
    ActorConfig,
    Flow,
    GeneratorWorker,
    GRPOAsyncConfig,
    PolicyWorker,
    RewardWorker,
    WorkerContext,
    compute_advantages,
    map_function,
    register,
)
from spmdflow.data.ragged import rows_of

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

    @register(transfer_mode="DP_PROTO", reads=("scores", "advantages"), writes=("sums",))
    def add_scores(self, batch: TensorDict) -> TensorDict:
        """sums = scores + those of the advantages: columns that other ranks make."""
        sums = batch["scores"] + torch.stack([row.sum() for row in rows_of(batch["advantages"])])
        return TensorDict({"sums": sums}, batch_size=batch.batch_size)


@map_function(reads=("response_mask",), writes=("num_tokens",))
def count_tokens(batch: TensorDict) -> TensorDict:
    """num_tokens of each response: where the generator is, as only it has the rows."""
    num_tokens = torch.stack([row.sum() for row in rows_of(batch["response_mask"])])
    return TensorDict({"num_tokens": num_tokens}, batch_size=batch.batch_size)


def main(flow: Flow, cfg: GRPOAsyncConfig) -> None:
    actor = flow.spawn(PolicyWorker, cfg.actor)
    generator = flow.spawn(Tireless, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weights = flow.connect(actor, generator)
    queue = flow.queue(prompts, weights, max_staleness=cfg.max_staleness)

    for step in flow.steps(cfg.total_steps):
        batch = next(queue)
        batch |= batch.map(count_tokens)
        assert min(batch.fetch("num_tokens")["num_tokens"]) > 0
        batch |= actor.compute_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
        batch |= generator.add_scores(batch)
        assert len(batch.fetch("sums")["sums"]) == len(batch)
        flow.save(every=cfg.save_every)
