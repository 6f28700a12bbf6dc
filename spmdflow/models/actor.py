"""The actor: the policy that generates, scores its own tokens and learns (paper Table 4)."""

from __future__ import annotations

from dataclasses import replace

from tensordict import TensorDict

from spmdflow.config.schema import ActorConfig
from spmdflow.hybrid_engine.factory import hybrid_of, storage_of, sync_mode
from spmdflow.models.generation import rollout_metrics, row_seeds
from spmdflow.models.policy import PolicyWorker
from spmdflow.objectives.loss import Loss
from spmdflow.rollout.factory import generator_of
from spmdflow.rollout.replica import Replica
from spmdflow.rollout.sampling import Sampling
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import WorkerContext


class ActorWorker(PolicyWorker):
    """Generates with the rollout engine, learns with the train engine, on the same ranks."""

    generates = True
    evaluation = None  # its responses are scored, whatever else it learns from

    def __init__(self, cfg: ActorConfig, context: WorkerContext) -> None:
        cfg = self.bind_engine(cfg)
        mode = sync_mode(cfg, context.layout)
        storage = storage_of(mode, context)
        super().__init__(cfg, context, adopt=None if storage is None else storage.adopt)
        replica = Replica.of(context.layout, context.rank, context.groups)
        rollout = replace(cfg.rollout, weights=mode)
        self.generator = generator_of(rollout, cfg.model.path, context.device, replica)
        self.hybrid = hybrid_of(self.engine, self.generator, context, cfg, storage=storage)
        self.sampling = Sampling.from_config(cfg.rollout)

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        writes=("responses", "response_mask", "rollout_log_probs"),
        extends=True,
        draws=True,
    )
    def generate_sequences(self, batch: TensorDict, *, greedy: bool = False) -> TensorDict:
        """One response for each row; the answer keeps the columns of the prompts.

        Syncs the generator's weights first if an update has changed the trainer's.
        """
        if self.hybrid.needs_sync:
            with self.resident("parameters"):
                self.report(self.hybrid.sync())
        self.generator.wake()
        sampling = self.sampling.to_greedy() if greedy else self.sampling
        made = self.hybrid.generate(batch["prompts"], sampling, row_seeds(self.context, self.call))
        if self.cfg.engine.residency == "offload":
            self.generator.sleep()
        self.report(rollout_metrics(batch["prompts"], made["responses"]))
        return made

    def train(self, batch: TensorDict, loss: Loss, *, prefix: str) -> dict[str, float]:
        """As `EngineWorker.train`, after what only generation needs is freed."""
        self.hybrid.release()
        return super().train(batch, loss, prefix=prefix)

    def close(self) -> None:
        """Free the generator."""
        self.generator.close()
