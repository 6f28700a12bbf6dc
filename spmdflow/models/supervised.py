"""The policy while it imitates: cross-entropy on examples, before any RL (supervised fine-tuning).

A row of data is one sequence (`prompts`) with marks (`loss_mask`). It is cut at its first learnt
token: what comes before is the prompt, the rest the response, with holes at what others say.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.models.base import EngineWorker
from spmdflow.objectives.supervised import SupervisedLoss, row_losses
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import Mean
from spmdflow.workers.micro_batch import MicroBatch


class SupervisedWorker(EngineWorker):
    """Updates and held-out losses of a policy on examples."""

    role = "actor"
    head = "causal_lm"
    exports = True
    evaluation = "compute_loss"

    @register(transfer_mode="3D_PROTO", reads=("prompts", "loss_mask"), writes=("losses",))
    def compute_loss(self, batch: TensorDict, *, prefix: str = "actor") -> TensorDict | None:
        """losses (B,): nats of each row's learnt tokens; reports the mean over tokens."""
        rows = example_rows(batch)
        made = self.score(rows, _losses)
        if made is None:
            return None
        tokens = float(rows["response_mask"].values().sum())
        total = float(made["losses"].sum())
        self.report({f"{prefix}/loss": Mean(total, tokens)})
        return made

    @register(transfer_mode="3D_PROTO", reads=("prompts", "loss_mask"), minibatches=True)
    def update_actor(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps."""
        return self.train(example_rows(batch), SupervisedLoss(), prefix="actor")


def example_rows(batch: TensorDict) -> TensorDict:
    """Whole sequences with marks -> prompts, responses and response_mask."""
    ids, masks = rows_of(batch["prompts"]), rows_of(batch["loss_mask"])
    cuts = [int(mask.int().argmax()) for mask in masks]
    assert all(cut > 0 for cut in cuts), cuts  # the encoder starts rows with something given
    columns = {
        "prompts": [row[:cut] for row, cut in zip(ids, cuts)],
        "responses": [row[cut:] for row, cut in zip(ids, cuts)],
        "response_mask": [mask[cut:] for mask, cut in zip(masks, cuts)],
    }
    kinds = {"response_mask": torch.bool}
    made = {
        name: ragged_from_rows(rows, dtype=kinds.get(name, torch.int64))
        for name, rows in columns.items()
    }
    return TensorDict(made, batch_size=batch.batch_size)


def _losses(output: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
    return {"losses": row_losses(output, micro)}
