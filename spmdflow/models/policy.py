"""The policy in training, and the frozen reference it is compared with (paper Table 4).

A policy scores its own tokens and learns. `ActorWorker` adds generation on the same ranks. A policy
alone trains while a `GeneratorWorker` on other ranks generates (disaggregated generation);
`flow.connect` brings it the weights. `text_rows` and `with_text_rows` make rows of pre-training
texts, which a policy may learn from beside its samples (PPO-ptx).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import ActorConfig
from spmdflow.data.ragged import (
    VALID,
    chosen_mask,
    is_ragged,
    lengths_of,
    pad,
    ragged,
    without_failed,
)
from spmdflow.errors import SpmdflowError
from spmdflow.hybrid_engine.remote import WeightSender
from spmdflow.models.base import EngineWorker
from spmdflow.objectives.log_prob import entropy_from_logits, log_probs_from_logits
from spmdflow.objectives.loss import inside
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.objectives.supervised import PretrainedPolicyLoss, text_mask
from spmdflow.parallel.layout import Layout
from spmdflow.serving.publisher import Publisher, publisher_of
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import CallInfo, Max, Mean, MiniBatch, WorkerContext
from spmdflow.workers.micro_batch import MicroBatch

UPDATE_READS = ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
UPDATE_MAY = ("ref_log_probs", "rollout_weights", "pretrain_ids", *VALID)
"""Columns of `update_actor`: those it needs, and those it uses if they are there."""


class PolicyWorker(EngineWorker):
    """Log-probabilities and updates of the policy."""

    role = "actor"
    head = "causal_lm"
    exports = True

    def __init__(
        self,
        cfg: ActorConfig,
        context: WorkerContext,
        *,
        adopt: Callable[..., None] | None = None,
    ) -> None:
        """adopt: see EngineWorker."""
        super().__init__(cfg, context, adopt=adopt)
        budget = cfg.rollout.max_new_tokens
        self.loss = PolicyLoss(cfg.loss, cfg.rollout.temperature, budget=budget)
        self._sender: WeightSender | None = None
        self._publisher: Publisher | None = None

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

    @register(transfer_mode="ONE_TO_ALL")
    def connect_server(self, url: str, backend: str = "spmdflow") -> None:
        """Prepare to publish weights to a vLLM that runs elsewhere; url: http://host:port.

        It must serve actor.model.path, with the weight-transfer backend named here: spmdflow, or
        nccl, which is vLLM's own (docs/HYBRID.md).
        """
        self._publisher = publisher_of(
            self.engine, self.context, self.cfg, url=url, backend=backend
        )

    @register(transfer_mode="ONE_TO_ALL")
    def publish_weights(self) -> None:
        """Bring the weights to the connected server, which stops for that long."""
        assert self._publisher is not None, "connect_server comes first"
        with self.resident("parameters"):
            self.report(self._publisher.publish())

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        optional=("rollout_log_probs", *VALID),
        writes=("old_log_probs",),
    )
    def compute_log_prob(self, batch: TensorDict) -> TensorDict | None:
        """old_log_probs: the trainer's log-probability of each response token."""
        made = self._log_probs(batch)
        if made is None:
            return None
        if "rollout_log_probs" in batch.keys():
            self._report_drift(batch, made["old_log_probs"])
        mask, entropy = chosen_mask(batch), pad(made["entropy"])
        total = float((entropy * mask).sum())
        self.report({"actor/entropy": Mean(total, float(mask.sum()))})
        return made.exclude("entropy")

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts",),
        writes=("pretrain_ids", "pretrain_losses"),
    )
    def compute_loss(self, batch: TensorDict) -> TensorDict | None:
        """The loss of pre-training texts, which are the prompts of these rows.

        pretrain_losses (B,): nats of each text; pretrain_ids: the texts, which `update_actor` mixes
        into its loss where they come along with samples (PPO-ptx).
        """
        texts = batch["prompts"]
        made = self.score(text_rows(texts), _text_losses)
        if made is None:
            return None
        losses = made["pretrain_losses"]
        tokens = float(len(texts.values()) - len(losses))
        self.report({"actor/pretrain_loss_before": Mean(float(losses.sum()), tokens)})
        columns = {"pretrain_ids": texts, "pretrain_losses": losses}
        return TensorDict(columns, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=UPDATE_READS, optional=UPDATE_MAY, minibatches=True)
    def update_actor(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps.

        With pretrain_ids, each sample's text is in the same steps, weighted by loss.pretrain_coef.
        Rows that failed (valid is False) are not learnt from.
        """
        batch = without_failed(batch)
        if "pretrain_ids" not in batch.keys():
            return self.train(batch, self.loss, prefix="actor")
        batch, self.call = with_text_rows(batch, self.call)
        mixed = PretrainedPolicyLoss(self.loss, self.cfg.loss.pretrain_coef)
        return self.train(batch, mixed, prefix="actor")

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
        mask = chosen_mask(batch)
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


def _text_losses(logits: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
    mask = text_mask(micro.attention_mask, micro.columns["is_text"].bool())
    log_probs = log_probs_from_logits(logits, micro.next_ids)
    return {"pretrain_losses": -inside(log_probs, mask).sum(-1)}


class ReferenceWorker(EngineWorker):
    """Log-probabilities under the policy that training started from; never updated."""

    role = "reference"
    head = "causal_lm"

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        writes=("ref_log_probs",),
    )
    def compute_ref_log_prob(self, batch: TensorDict) -> TensorDict | None:
        """ref_log_probs: log-probability of each response token, at the settings' temperature."""
        temperature = self.cfg.temperature

        def score(logits: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
            log_probs = log_probs_from_logits(logits, micro.next_ids, temperature)
            return {"ref_log_probs": micro.gather(log_probs)}

        return self.score(batch, score)


def text_rows(texts: Tensor) -> TensorDict:
    """Rows with the texts (ragged ids) as prompts, empty responses, and is_text True."""
    count, device = texts.shape[0], texts.device
    empty = ragged(texts.values()[:0], torch.zeros(count, dtype=torch.int64))
    marks = torch.ones(count, dtype=torch.bool, device=device)
    columns = {"prompts": texts, "responses": empty, "is_text": marks}
    return TensorDict(columns, batch_size=[count])


def with_text_rows(batch: TensorDict, call: CallInfo) -> tuple[TensorDict, CallInfo]:
    """Samples that bring a text along (pretrain_ids) -> samples and texts as rows of their own.

    Sample i's text is row n + i, in the same mini-batches as the sample. Each mini-batch has twice
    the rows in twice the forwards: under a limit of tokens, texts should be as short as samples.
    """
    count = batch.batch_size[0]
    texts = text_rows(batch["pretrain_ids"])
    samples = batch.exclude("pretrain_ids")
    samples["is_text"] = torch.zeros_like(texts["is_text"])
    columns = {
        str(name): _stack(column, texts[name] if name in texts.keys() else None)
        for name, column in samples.items()
        if isinstance(column, Tensor)
    }
    minis = tuple(
        MiniBatch(torch.cat([mini.index, mini.index + count]), 2 * mini.num_micro_batches)
        for mini in call.mini_batches
    )
    return TensorDict(columns, batch_size=[2 * count]), replace(call, mini_batches=minis)


def _stack(column: Tensor, below: Tensor | None) -> Tensor:
    """A column of the samples with one of the texts below it, or with as many empty rows."""
    if not is_ragged(column):
        return torch.cat([column, torch.zeros_like(column) if below is None else below])
    lengths = lengths_of(column)
    if below is None:
        return ragged(column.values(), torch.cat([lengths, torch.zeros_like(lengths)]))
    values = torch.cat([column.values(), below.values()])
    return ragged(values, torch.cat([lengths, lengths_of(below)]))
