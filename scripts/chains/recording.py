"""grpo_async that keeps every trained row and its tokens: RUN_DIR/rows/step-S-rank-R.pt."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from spmdflow import (
    Flow,
    GeneratorWorker,
    GRPOAsyncConfig,
    PolicyWorker,
    ReferenceWorker,
    RewardWorker,
    compute_advantages,
    compute_rollout_weights,
)
from spmdflow.data.ragged import rows_of
from spmdflow.worker_api.register import register


class RecordingGenerator(GeneratorWorker):
    """Writes the rows that it hands over for training."""

    role = "generator"

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        writes=("responses", "response_mask", "rollout_log_probs", "token_versions"),
        extends=True,
        finishes=True,
    )
    def finish_sequences(self, batch: TensorDict, *, version: int) -> TensorDict:
        """See GeneratorWorker.finish_sequences."""
        columns = super().finish_sequences(batch, version=version)
        rows: dict[str, Any] = {
            "row_ids": self.call.row_ids.clone(),
            "step": self.call.step,
            "version": version,
            "prompts": [row.clone() for row in rows_of(batch["prompts"])],
        }
        for name in ("responses", "rollout_log_probs", "token_versions"):
            rows[name] = [row.clone() for row in rows_of(columns[name])]
        assert self.context.run_dir is not None
        folder = self.context.run_dir / "rows"
        folder.mkdir(exist_ok=True)
        torch.save(rows, folder / f"step-{self.call.step}-rank-{self.context.rank}.pt")
        counters = getattr(self.generator, "counters", None)
        if counters is not None:
            torch.save(vars(counters), folder / f"counters-{self.context.rank}.pt")
        return columns


def main(flow: Flow, cfg: GRPOAsyncConfig) -> None:
    """As grpo_async.py, with the recording generator; saves each step's weights for verify.py."""
    actor = flow.spawn(PolicyWorker, cfg.actor)
    generator = flow.spawn(RecordingGenerator, cfg.actor)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weights = flow.connect(actor, generator)
    queue = flow.queue(prompts, weights, max_staleness=cfg.max_staleness)

    for step in flow.steps(cfg.total_steps):
        batch = next(queue)
        batch |= actor.compute_log_prob(batch)
        if cfg.max_staleness:
            batch |= batch.map(compute_rollout_weights, cfg=cfg.correction)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
        weights.sync()
        flow.save(every=cfg.save_every)
