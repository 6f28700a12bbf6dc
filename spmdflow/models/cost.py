"""Safe RLHF's second signal (Dai et al. 2024): a cost for each response, and its own critic.

Both are the reward's and the critic's code under other names, so that a batch has room for both.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from spmdflow.data.rows import VALID
from spmdflow.models.critic import CriticWorker
from spmdflow.models.reward import READS, RewardWorker
from spmdflow.transfer.register import register

_WRITES = ("costs", "token_level_costs", "cost_valid")


class CostWorker(RewardWorker):
    """Scores how harmful responses are, with `cfg.model` or `cfg.function`."""

    role = "cost"

    @register(transfer_mode="3D_PROTO", reads=READS, writes=_WRITES)
    def compute_cost(self, batch: TensorDict, *, prefix: str = "cost") -> TensorDict | None:
        """costs (B,); token_level_costs: the cost at the last response token.

        cost_valid (B,) bool: see `compute_reward`.
        """
        made = self.compute_reward(batch, prefix=prefix)
        if made is None:
            return None
        found = ("scores", "token_level_rewards", "valid")
        columns = {name: made[column] for name, column in zip(_WRITES, found, strict=True)}
        return TensorDict(columns, batch_size=batch.batch_size)


class CostCriticWorker(CriticWorker):
    """Estimates the cost to come before each response token, and learns it."""

    role = "cost_critic"

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        writes=("cost_values",),
    )
    def compute_cost_values(self, batch: TensorDict) -> TensorDict | None:
        """cost_values: the critic's output at the position before each response token."""
        made = self.compute_values(batch)
        if made is None:
            return None
        return TensorDict({"cost_values": made["values"]}, batch_size=batch.batch_size)

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask", "cost_values", "cost_returns"),
        optional=VALID,
        minibatches=True,
    )
    def update_cost_critic(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps."""
        known = ("prompts", "responses", "response_mask", *VALID)
        kept = {name: batch[name] for name in known if name in batch.keys()}
        own = {"values": batch["cost_values"], "returns": batch["cost_returns"]}
        metrics = self.update_critic(TensorDict(kept | own, batch_size=batch.batch_size))
        return {f"cost_{name}": value for name, value in metrics.items()}
