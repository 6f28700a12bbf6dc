"""A reward model that learns from pairs: Bradley-Terry on the scores of their last tokens.

A row of data is a pair: both sequences in `prompts`, cut at `chosen_tokens`. The two become rows
of their own, each in any micro-batch; see `objectives.preference.PairLoss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.offline import RewardModelConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.data.rows import select_rows
from spmdflow.models.base import EngineWorker
from spmdflow.models.pretraining import text_rows
from spmdflow.objectives.preference import PairLoss, bradley_terry, score_slopes
from spmdflow.tracking.metric import merge
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import Mean, MiniBatch, WorkerContext
from spmdflow.workers.micro_batch import MicroBatch


class RewardModelWorker(EngineWorker):
    """Updates and held-out accuracy of a model that scores whole sequences."""

    role = "reward_model"
    head = "critic"
    evaluation = "compute_preference"

    def __init__(
        self,
        cfg: RewardModelConfig,
        context: WorkerContext,
        *,
        adopt: Callable[..., None] | None = None,
    ) -> None:
        """adopt: see EngineWorker."""
        super().__init__(cfg, context, adopt=adopt)
        self.loss = PairLoss()

    @register(transfer_mode="3D_PROTO", reads=("prompts", "chosen_tokens"), writes=("margins",))
    def compute_preference(
        self, batch: TensorDict, *, prefix: str = "reward_model"
    ) -> TensorDict | None:
        """margins (B,): score of chosen - score of rejected.

        Reports the mean loss, the accuracy (a pair of equal scores counts half) and the margin.
        """
        made = self._scores(pair_rows(batch), 2 * self.call.num_micro_batches)
        if made is None:
            return None
        margins = made[: len(batch)] - made[len(batch) :]
        losses = bradley_terry(made[: len(batch)], made[len(batch) :])
        right = (margins > 0).double() + 0.5 * (margins == 0).double()
        shown = {"loss": losses, "accuracy": right, "margin": margins}
        count = len(margins)
        self.report({f"{prefix}/{n}": Mean(float(x.sum()), count) for n, x in shown.items()})
        return TensorDict({"margins": margins}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("prompts", "chosen_tokens"), minibatches=True)
    def update_reward_model(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps.

        A step scores its pairs once without gradient to know how each score counts.
        """
        steps, call = [], self.call
        for mini in call.mini_batches:
            rows = pair_rows(select_rows(batch, mini.index))
            num_micro_batches = 2 * mini.num_micro_batches
            rows = self._with_slopes(rows, num_micro_batches)
            every = torch.arange(rows.batch_size[0])
            self.call = replace(call, mini_batches=(MiniBatch(every, num_micro_batches),))
            steps.append(self.train(rows, self.loss, prefix=self.role))
        return merge(steps) | {f"{self.role}/optimizer_steps": float(len(steps))}

    def save_state(self, folder: Path) -> None:
        """This rank's state, and beside it the model as a Hugging Face folder."""
        super().save_state(folder)
        with self.resident("parameters"):
            self.engine.export_hugging_face(folder / "hugging_face")

    def _scores(self, rows: TensorDict, num_micro_batches: int) -> Tensor | None:
        """(2n,) float32; None before the last pipeline stage."""
        with self.resident("parameters"):
            made = self.engine.forward(rows, _last, num_micro_batches=num_micro_batches)
        return None if made is None else made["scores"].float()

    def _with_slopes(self, rows: TensorDict, num_micro_batches: int) -> TensorDict:
        """The rows with what `PairLoss` reads; zeros before the last stage, which has no loss."""
        scores = self._scores(rows, num_micro_batches)
        if scores is None:
            scores = torch.zeros(rows.batch_size)
        losses, slopes = scores, scores
        if len(scores):
            chosen, rejected = scores.chunk(2)
            losses, slopes = score_slopes(chosen, rejected)
        rows["pair_losses"], rows["score_slopes"] = torch.cat([losses, losses]), slopes
        return rows


def pair_rows(batch: TensorDict) -> TensorDict:
    """n pairs -> 2n sequences: row i is the chosen one of pair i, row n + i the rejected one."""
    both, cuts = rows_of(batch["prompts"]), batch["chosen_tokens"].tolist()
    sequences = [row[:cut] for row, cut in zip(both, cuts)]
    sequences += [row[cut:] for row, cut in zip(both, cuts)]
    rows: TensorDict = text_rows(ragged_from_rows(sequences, dtype=torch.int64)).exclude("is_text")
    return rows


def _last(output: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
    return {"scores": micro.last(output)}
