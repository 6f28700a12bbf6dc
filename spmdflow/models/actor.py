"""The actor: the policy that generates, scores its own tokens and learns (paper Table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensordict import TensorDict

from spmdflow.config.schema import ActorConfig
from spmdflow.hybrid_engine.factory import hybrid_of, storage_of, sync_mode
from spmdflow.models.generator import check_sampling, rollout_metrics, row_seeds
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
        check=check_sampling,
    )
    def generate_sequences(
        self,
        batch: TensorDict,
        *,
        greedy: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> TensorDict:
        """One response for each row; the answer keeps the columns of the prompts.

        Arguments replace settings of actor.rollout for this call. stop: a response ends with the
        token that makes its text have one of these strings; that token stays, and with it what it
        says beyond the string (vLLM's include_stop_str_in_output). temperature, top_p, top_k and
        greedy say which tokens are taken; rollout_log_probs are of the policy at the settings'
        temperature in any case, which is what `compute_log_prob` gives and `update_actor` learns.

        Syncs the generator's weights first if an update has changed the trainer's.
        """
        if self.hybrid.needs_sync:
            with self.resident("parameters"):
                self.report(self.hybrid.sync())
        self.generator.wake()
        sampling = self.sampling.for_call(
            greedy=greedy,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            stop=stop,
            tokenizer_path=self.cfg.rollout.tokenizer_path,
        )
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
