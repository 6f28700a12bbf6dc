"""The actor: the policy that generates, scores its own tokens and learns (paper Table 4)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import ActorConfig
from spmdflow.data.ragged import pad
from spmdflow.data.rows import total_length
from spmdflow.data.seed import seed_of
from spmdflow.errors import SpmdflowError
from spmdflow.hybrid_engine.factory import hybrid_of, storage_of, sync_mode
from spmdflow.models.base import EngineWorker
from spmdflow.objectives.log_prob import entropy_from_logits, log_probs_from_logits
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.rollout.factory import generator_of
from spmdflow.rollout.replica import Replica
from spmdflow.rollout.sampling import Sampling
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import Max, Mean, Metric, Sum, WorkerContext
from spmdflow.workers.micro_batch import MicroBatch


class ActorWorker(EngineWorker):
    """Generates with the rollout engine, learns with the train engine, on the same ranks."""

    role = "actor"

    def __init__(self, cfg: ActorConfig, context: WorkerContext) -> None:
        cfg = self.bind_engine(cfg)
        mode = sync_mode(cfg, context.layout)
        storage = storage_of(mode, context)
        adopt = None if storage is None else storage.adopt
        super().__init__(cfg, context, head="causal_lm", adopt=adopt)
        replica = Replica.of(context.layout, context.rank, context.groups)
        rollout = replace(cfg.rollout, weights=mode)
        self.generator = generator_of(rollout, cfg.model.path, context.device, replica)
        self.hybrid = hybrid_of(self.engine, self.generator, context, cfg, storage=storage)
        self.sampling = Sampling.from_config(cfg.rollout)
        budget = cfg.rollout.max_new_tokens
        self.loss = PolicyLoss(cfg.loss, cfg.rollout.temperature, budget=budget)

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        writes=("responses", "response_mask", "rollout_log_probs"),
        extends=True,
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
        made = self.hybrid.generate(batch["prompts"], sampling, self._seeds())
        if self.cfg.engine.residency == "offload":
            self.generator.sleep()
        self.report(_rollout_metrics(batch["prompts"], made["responses"]))
        return made

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        optional=("rollout_log_probs",),
        writes=("old_log_probs",),
    )
    def compute_log_prob(self, batch: TensorDict) -> TensorDict | None:
        """old_log_probs: the trainer's log-probability of each response token."""
        made = self._log_probs(batch)
        if made is None:
            return None
        if "rollout_log_probs" in batch.keys():
            self._report_drift(batch, made["old_log_probs"])
        mask, entropy = pad(batch["response_mask"]), pad(made["entropy"])
        total = float((entropy * mask).sum())
        self.report({"actor/entropy": Mean(total, float(mask.sum()))})
        return made.exclude("entropy")

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask", "old_log_probs", "advantages"),
    )
    def compute_loss(self, batch: TensorDict) -> dict[str, Metric]:
        """The policy loss of these rows, without an update (token mean)."""
        made = self._log_probs(batch)
        if made is None:
            return {}
        log_probs = pad(made["old_log_probs"])
        old, advantages = pad(batch["old_log_probs"]), pad(batch["advantages"])
        mask = pad(batch["response_mask"])
        terms = self.loss.terms(log_probs, old, advantages, mask)
        return {"actor/pg_loss": Mean(float((terms.loss * mask).sum()), float(mask.sum()))}

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask", "old_log_probs", "advantages"),
        optional=("ref_log_probs", "rollout_weights"),
        minibatches=True,
    )
    def update_actor(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps."""
        self.hybrid.release()
        return self.train(batch, self.loss, prefix="actor")

    def save_state(self, folder: Path) -> None:
        """This rank's state, and beside it the policy as a Hugging Face folder."""
        super().save_state(folder)
        with self.resident("parameters"):
            self.engine.export_hugging_face(folder / "hugging_face")

    def close(self) -> None:
        """Free the generator."""
        self.generator.close()

    def _log_probs(self, batch: TensorDict) -> TensorDict | None:
        temperature = self.cfg.rollout.temperature

        def score(logits: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
            log_probs = log_probs_from_logits(logits, micro.next_ids, temperature)
            entropy = entropy_from_logits(logits, temperature)
            return {
                "old_log_probs": micro.gather(log_probs),
                "entropy": micro.gather(entropy),
            }

        return self.score(batch, score)

    def _seeds(self) -> list[int]:
        seed, call = self.context.seed, self.call
        return [seed_of(seed, "generate", call.step, row) for row in call.row_ids.tolist()]

    def _report_drift(self, batch: TensorDict, old: Tensor) -> None:
        """|log-prob gap| between the rollout and the trainer, over the policy's tokens."""
        mask = pad(batch["response_mask"])
        gap = (pad(batch["rollout_log_probs"]) - pad(old)).abs() * mask
        total, tokens = float(gap.sum()), float(mask.sum())
        largest = float(gap.max()) if gap.numel() else 0.0
        self.report({"rollout/drift": Mean(total, tokens), "rollout/drift_max": Max(largest)})
        limit = self.cfg.rollout.max_drift
        if limit is not None and total > limit * tokens:
            raise SpmdflowError(
                f"rollout drift: got a mean |log-prob gap| of {total / tokens:.3g} on rank "
                f"{self.context.rank}, expected at most {limit:g} (rollout.max_drift); "
                f"check rollout.dtype against model.dtype and the weight sync"
            )


def _rollout_metrics(prompts: Tensor, responses: Tensor) -> dict[str, Metric]:
    rows, tokens = prompts.shape[0], total_length(responses)
    return {
        "rollout/prompt_tokens": Sum(total_length(prompts)),
        "rollout/response_tokens": Sum(tokens),
        "rollout/response_length": Mean(tokens, rows),
    }
