"""The reference: the frozen policy that the KL is measured against (paper Table 4)."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import ReferenceConfig
from spmdflow.models.base import EngineWorker
from spmdflow.objectives.log_prob import log_probs_from_logits
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import WorkerContext
from spmdflow.workers.micro_batch import MicroBatch


class ReferenceWorker(EngineWorker):
    """Log-probabilities under the policy that training started from; never updated."""

    role = "reference"
    head = "causal_lm"

    def __init__(
        self,
        cfg: ReferenceConfig,
        context: WorkerContext,
        *,
        adopt: Callable[..., None] | None = None,
    ) -> None:
        """adopt: see EngineWorker."""
        super().__init__(cfg, context, adopt=adopt)
        self._temperature = context.config.actor.rollout.temperature

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        writes=("ref_log_probs",),
    )
    def compute_ref_log_prob(self, batch: TensorDict) -> TensorDict | None:
        """ref_log_probs: log-probability of each response token, at the actor's temperature."""

        def score(logits: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
            log_probs = log_probs_from_logits(logits, micro.next_ids, self._temperature)
            return {"ref_log_probs": micro.gather(log_probs)}

        return self.score(batch, score)
