"""The critic: learns to estimate the return from each response token on (paper Table 4).

Safe RLHF's critic of the cost (Dai et al. 2024) is the same code with other column names.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ROW_WEIGHTS, VALID, without_failed
from spmdflow.models.base import EngineWorker
from spmdflow.objectives.log_prob import ScalarOutput
from spmdflow.objectives.policy import ValueLoss
from spmdflow.worker_api.register import register
from spmdflow.workers.micro_batch import MicroBatch


class CriticWorker(EngineWorker):
    """A language model with a scalar head: a reward model's, or a zero one on a causal LM."""

    role = "critic"
    head = "critic"

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        writes=("values",),
    )
    def compute_values(self, batch: TensorDict) -> TensorDict | None:
        """Return values (ragged float32): the output one position before each response token.

        None before the last pipeline stage.
        """

        def values(output: ScalarOutput, micro: MicroBatch) -> dict[str, Tensor]:
            return {"values": micro.spread(output.at(micro.predicting))}

        return self.score(batch, values)

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask", "values", "returns"),
        optional=(ROW_WEIGHTS, *VALID),
        minibatches=True,
    )
    def update_critic(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps.

        Failed rows (valid is False) are ignored.
        """
        return self.train(without_failed(batch), ValueLoss(self.cfg.loss), prefix="critic")


class CostCriticWorker(CriticWorker):
    """Learns to estimate the cost from each response token on."""

    role = "cost_critic"

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        writes=("cost_values",),
    )
    def compute_cost_values(self, batch: TensorDict) -> TensorDict | None:
        """Return cost_values (ragged float32): the output one position before each response token.

        None before the last pipeline stage.
        """
        columns = self.compute_values(batch)
        if columns is None:
            return None
        return TensorDict({"cost_values": columns["values"]}, batch_size=batch.batch_size)

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask", "cost_values", "cost_returns"),
        optional=(ROW_WEIGHTS, *VALID),
        minibatches=True,
    )
    def update_cost_critic(self, batch: TensorDict) -> dict[str, Any]:
        """Do as `update_critic`, with cost_values as values and cost_returns as returns.

        Takes one optimizer step for each mini-batch. The metrics are means over the steps, and
        their names get the prefix "cost_".
        """
        known = ("prompts", "responses", "response_mask", ROW_WEIGHTS, *VALID)
        shared_columns = {}
        for name in known:
            if name in batch.keys():
                shared_columns[name] = batch[name]
        renamed_columns = {"values": batch["cost_values"], "returns": batch["cost_returns"]}
        metrics = self.update_critic(
            TensorDict(shared_columns | renamed_columns, batch_size=batch.batch_size)
        )
        result = {}
        for name, value in metrics.items():
            result[f"cost_{name}"] = value
        return result
