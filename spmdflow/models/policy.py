"""The policy as it is trained: scores its own tokens and learns (paper Table 4).

`ActorWorker` adds generation on the same ranks. A policy alone trains while a `GeneratorWorker`
on other ranks generates (disaggregated generation); `flow.connect` brings it the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import ActorConfig
from spmdflow.data.ragged import pad
from spmdflow.errors import SpmdflowError
from spmdflow.hybrid_engine.remote import WeightSender
from spmdflow.models.base import EngineWorker
from spmdflow.objectives.log_prob import entropy_from_logits, log_probs_from_logits
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import Max, Mean, Metric, WorkerContext
from spmdflow.workers.micro_batch import MicroBatch


class PolicyWorker(EngineWorker):
    """Log-probabilities and updates of the policy."""

    role = "actor"

    def __init__(
        self,
        cfg: ActorConfig,
        context: WorkerContext,
        *,
        adopt: Callable[..., None] | None = None,
    ) -> None:
        """adopt: see EngineWorker."""
        super().__init__(cfg, context, head="causal_lm", adopt=adopt)
        budget = cfg.rollout.max_new_tokens
        self.loss = PolicyLoss(cfg.loss, cfg.rollout.temperature, budget=budget)
        self._sender: WeightSender | None = None

    @register(transfer_mode="ONE_TO_ALL")
    def open_weights(self, peer: dict[str, Any]) -> None:
        """Prepare to send the weights to a generator on other ranks; peer: its layout."""
        self._sender = WeightSender(self.engine, self.context, self.cfg, Layout(**peer))

    @register(transfer_mode="ONE_TO_ALL")
    def send_weights(self) -> None:
        """Send the weights to the connected generator, which receives in the same call."""
        assert self._sender is not None, "open_weights comes first"
        with self.resident("parameters"):
            self._sender.send()

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
        return self.train(batch, self.loss, prefix="actor")

    def save_state(self, folder: Path) -> None:
        """This rank's state, and beside it the policy as a Hugging Face folder."""
        super().save_state(folder)
        with self.resident("parameters"):
            self.engine.export_hugging_face(folder / "hugging_face")

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
