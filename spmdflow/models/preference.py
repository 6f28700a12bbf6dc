"""Models that learn from preferences: a policy, its frozen reference, a reward model.

A row of data brings two sequences: a pair its chosen and its rejected answer, a labelled row its
answer and, on the same prompt, the answer of another row, for KTO's estimate of the KL. They become
rows of their own, each in any micro-batch of any rank; see `objectives.preference.PairLoss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.offline import PreferenceActorConfig, PreferenceLossConfig
from spmdflow.data.ragged import pad, ragged_from_rows, rows_of, select_rows
from spmdflow.errors import ConfigError
from spmdflow.models.base import EngineWorker
from spmdflow.models.policy import text_rows
from spmdflow.objectives.loss import Loss
from spmdflow.objectives.preference import (
    PREFERENCE_LOSSES,
    LabelLoss,
    PairLoss,
    answer_log_probs,
    bradley_terry,
    implicit_rewards,
    last_score,
    pair_losses,
    score_slopes,
)
from spmdflow.tracking.metric import merge
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import Mean, MiniBatch, WorkerContext
from spmdflow.workers.micro_batch import MicroBatch

ANSWERS = ("prompts", "loss_mask")
KINDS = ("chosen_tokens", "answers", "desirable")
"""Columns of a row of preferences: of every kind, and those of pairs or of labelled rows."""


class PairWorker(EngineWorker):
    """What models of preferences share: scoring both sequences of each row, stepping on pairs."""

    score_sequence = staticmethod(answer_log_probs)
    """What is compared of a sequence: its answer's log-probability, or a reward model's score."""

    def _scores(self, rows: TensorDict, num_micro_batches: int) -> Tensor | None:
        """(n, 2) float32: scores of both sequences of n rows, given as 2n sequences.

        num_micro_batches: of n rows. None before the last pipeline stage.
        """
        made = self._score_each(rows, 2 * num_micro_batches)
        return None if made is None else _pair_up(made)

    def _score_each(self, rows: TensorDict, num_micro_batches: int) -> Tensor | None:
        """(n,) float32: scores of n sequences."""

        def scores(output: Tensor, micro: MicroBatch) -> dict[str, Tensor]:
            return {"scores": self.score_sequence(output, micro)}

        with self.resident("parameters"):
            made = self.engine.forward(rows, scores, num_micro_batches=num_micro_batches)
        return None if made is None else made["scores"].float()

    def _step_on_pairs(
        self,
        rows: TensorDict,
        losses: Tensor,
        slopes: Tensor,
        num_micro_batches: int,
        *,
        prefix: str,
    ) -> dict[str, float]:
        """One step on n pairs; rows: 2n sequences, losses (n,) and slopes (2n,) of their scores.

        Before the last pipeline stage, which has the loss, they may hold anything.
        """
        rows["pair_losses"], rows["score_slopes"] = torch.cat([losses, losses]), slopes
        loss = PairLoss(self.score_sequence)
        return self._step(rows, loss, 2 * num_micro_batches, prefix=prefix)

    def _step(
        self, rows: TensorDict, loss: Loss, num_micro_batches: int, *, prefix: str
    ) -> dict[str, float]:
        """One optimizer step on all rows."""
        every = torch.arange(rows.batch_size[0])
        self.call = replace(self.call, mini_batches=(MiniBatch(every, num_micro_batches),))
        return self.train(rows, loss, prefix=prefix)


class AnswerReferenceWorker(PairWorker):
    """Log-probabilities of answers under the policy that training started from; never updated."""

    role = "reference"
    head = "causal_lm"
    evaluation_columns = "compute_ref_log_prob"

    @register(
        transfer_mode="3D_PROTO", reads=ANSWERS, optional=KINDS, writes=("ref_answer_log_probs",)
    )
    def compute_ref_log_prob(self, batch: TensorDict) -> TensorDict | None:
        """ref_answer_log_probs (B, 2): nats of each row's two answers, summed over tokens."""
        scores = self._scores(answer_rows(batch), self.call.num_micro_batches)
        if scores is None:
            return None
        return TensorDict({"ref_answer_log_probs": scores}, batch_size=batch.batch_size)


class PreferenceWorker(PairWorker):
    """Updates and held-out margins of a policy that learns from preferences.

    Its loss is the section `preference` of its settings, or else `loss`: so that a class that is an
    ActorWorker too has both.
    """

    role = "actor"
    head = "causal_lm"
    exports = True
    evaluation = "compute_preference"
    reads: ClassVar[tuple[str, ...]] = (*ANSWERS, "ref_answer_log_probs")

    def __init__(
        self,
        cfg: PreferenceActorConfig,
        context: WorkerContext,
        *,
        adopt: Callable[..., None] | None = None,
    ) -> None:
        """adopt: see EngineWorker."""
        super().__init__(cfg, context, adopt=adopt)
        self._seen: list[dict[str, Mean]] = []
        self._preference = preference_loss_of(cfg)
        PREFERENCE_LOSSES.find(self._preference.name)

    @register(transfer_mode="3D_PROTO", reads=reads, optional=KINDS, writes=("margins",))
    def compute_preference(self, batch: TensorDict, *, prefix: str = "actor") -> TensorDict | None:
        """margins (B,): implicit reward of chosen - rejected; of a labelled answer +- its own.

        Pairs report loss, accuracy (equal rewards count half), margin and both rewards; labelled
        rows the mean rewards of both kinds and the KL estimate, which may be negative here.
        """
        rows, ref = answer_rows(batch), batch["ref_answer_log_probs"]
        scores = self._scores(rows, self.call.num_micro_batches)
        if scores is None:
            return None
        rewards = implicit_rewards(scores, ref, self._preference)
        if is_pairs(batch):
            losses, _ = pair_losses(scores, ref, answer_tokens(rows), self._preference)
            shown = {"loss": _mean(losses)} | _pair_metrics(rewards)
            margins = rewards[:, 0] - rewards[:, 1]
        else:
            good = batch["desirable"].bool()
            margins = torch.where(good, rewards[:, 0], -rewards[:, 0])
            shown = {
                "desirable_reward": _mean(rewards[good, 0]),
                "undesirable_reward": _mean(rewards[~good, 0]),
                "kl": _mean(scores[:, 1] - ref[:, 1]),
            }
        self.report({f"{prefix}/{name}": mean for name, mean in shown.items()})
        return TensorDict({"margins": margins}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=reads, optional=KINDS, minibatches=True)
    def update_actor(self, batch: TensorDict) -> dict[str, Any]:
        """`update_preference` under the name that every policy has."""
        return self.update_preference(batch)

    @register(transfer_mode="3D_PROTO", reads=reads, optional=KINDS, minibatches=True)
    def update_preference(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps.

        A step first scores its rows once without gradient: of pairs both answers, to know how each
        counts, of labelled rows those that measure the KL.
        """
        steps, self._seen = [], []
        update = self._pair_step if is_pairs(batch) else self._label_step
        for mini in self.call.mini_batches:
            steps.append(update(select_rows(batch, mini.index), mini.num_micro_batches))
        self.report({f"actor/{name}": mean for name, mean in _add_means(self._seen).items()})
        return merge(steps) | {"actor/optimizer_steps": float(len(steps))}

    def _pair_step(self, batch: TensorDict, num_micro_batches: int) -> dict[str, float]:
        """Pairs, after a forward without gradient has told how each answer counts."""
        ref, rows = batch["ref_answer_log_probs"], answer_rows(batch)
        scores = self._scores(rows, num_micro_batches)
        losses, slopes = torch.zeros(len(ref)), torch.zeros(len(ref), 2)
        if scores is not None:
            losses, slopes = pair_losses(scores, ref, answer_tokens(rows), self._preference)
            self._seen.append(_pair_metrics(implicit_rewards(scores, ref, self._preference)))
        return self._step_on_pairs(
            rows, losses, slopes.T.reshape(-1), num_micro_batches, prefix="actor"
        )

    def _label_step(self, batch: TensorDict, num_micro_batches: int) -> dict[str, float]:
        """Labelled rows, after the other rows' answers have measured the KL."""
        ref = batch["ref_answer_log_probs"]
        others = self._score_each(_build_rows(_cut_other_answers(batch)), num_micro_batches)
        rows = _build_rows(_cut_own_answers(batch))
        rows["ref_answer_log_probs"], rows["desirable"] = ref, batch["desirable"]
        rows["kl_log_ratios"] = ref[:, 1] * 0 if others is None else others - ref[:, 1]
        return self._step(rows, LabelLoss(self._preference), num_micro_batches, prefix="actor")


class RewardModelWorker(PairWorker):
    """A reward model: Bradley-Terry on the scores of both sequences' last tokens.

    A row of data is a pair: both sequences in `prompts`, cut at `chosen_tokens`.
    """

    role = "reward_model"
    head = "critic"
    exports = True
    evaluation = "compute_preference"
    score_sequence = staticmethod(last_score)

    @register(transfer_mode="3D_PROTO", reads=("prompts", "chosen_tokens"), writes=("margins",))
    def compute_preference(
        self, batch: TensorDict, *, prefix: str = "reward_model"
    ) -> TensorDict | None:
        """margins (B,): score of chosen - score of rejected.

        Reports the mean loss, the accuracy (a pair of equal scores counts half) and the margin.
        """
        scores = self._scores(pair_rows(batch), self.call.num_micro_batches)
        if scores is None:
            return None
        chosen, rejected = scores.T
        margins = chosen - rejected
        shown = {
            "loss": bradley_terry(chosen, rejected),
            "accuracy": _accuracies(margins),
            "margin": margins,
        }
        count = len(margins)
        self.report({f"{prefix}/{n}": Mean(float(x.sum()), count) for n, x in shown.items()})
        return TensorDict({"margins": margins}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("prompts", "chosen_tokens"), minibatches=True)
    def update_reward_model(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps.

        A step scores its pairs once without gradient to know how each score counts.
        """
        steps = []
        for mini in self.call.mini_batches:
            rows = pair_rows(select_rows(batch, mini.index))
            scores = self._scores(rows, mini.num_micro_batches)
            losses, slopes = torch.zeros(len(mini.index)), torch.zeros(rows.batch_size)
            if scores is not None and len(scores):
                losses, slopes = score_slopes(*scores.T)
            count = mini.num_micro_batches
            steps.append(self._step_on_pairs(rows, losses, slopes, count, prefix=self.role))
        return merge(steps) | {f"{self.role}/optimizer_steps": float(len(steps))}


def preference_loss_of(cfg: Any) -> PreferenceLossConfig:
    """The section `preference`, or else `loss`, of a policy's settings (Any: the user's class)."""
    loss = getattr(cfg, "preference", cfg.loss)
    if not isinstance(loss, PreferenceLossConfig):
        raise ConfigError(
            f"PreferenceWorker: got {type(cfg).__name__}, whose loss is a {type(loss).__name__}, "
            f"expected a PreferenceLossConfig; give it a section "
            f"`preference: PreferenceLossConfig = part(PreferenceLossConfig)`"
        )
    return loss


def is_pairs(batch: TensorDict) -> bool:
    """Whether the rows are pairs; else they have labels."""
    return "chosen_tokens" in batch.keys()


def answer_rows(batch: TensorDict) -> TensorDict:
    """n rows -> 2n sequences: row i is the first answer of row i, row n + i the second one.

    Prompts, responses and response_mask; first and second: chosen and rejected, or a labelled
    row's answer and, after the same prompt, another row's answer.
    """
    if not is_pairs(batch):
        return _build_rows([*_cut_own_answers(batch), *_cut_other_answers(batch)])
    both, cuts = _read_marked(batch), batch["chosen_tokens"].tolist()
    chosen = [_cut(ids[:cut], mask[:cut]) for (ids, mask), cut in zip(both, cuts, strict=True)]
    rejected = [_cut(ids[cut:], mask[cut:]) for (ids, mask), cut in zip(both, cuts, strict=True)]
    return _build_rows([*chosen, *rejected])


def answer_tokens(rows: TensorDict) -> Tensor:
    """(n, 2) float32: learnt tokens of both answers; rows: 2n sequences of `answer_rows`."""
    return _pair_up(pad(rows["response_mask"]).sum(-1).float())


Sequence = tuple[Tensor, Tensor, Tensor]
"""Ids of the prompt (P,), of the response (R,), and which of those are the answer's (R,) bool."""


def _read_marked(batch: TensorDict) -> list[tuple[Tensor, Tensor]]:
    return list(zip(rows_of(batch["prompts"]), rows_of(batch["loss_mask"]), strict=True))


def _cut(ids: Tensor, mask: Tensor) -> Sequence:
    """A marked sequence, cut before its first learnt token."""
    first = int(mask.int().argmax())
    assert first > 0, mask  # the encoder starts rows with a prompt
    return ids[:first], ids[first:], mask[first:]


def _cut_own_answers(batch: TensorDict) -> list[Sequence]:
    return [_cut(*row) for row in _read_marked(batch)]


def _cut_other_answers(batch: TensorDict) -> list[Sequence]:
    """Prompts of labelled rows with the answers of other rows."""
    answers = rows_of(batch["answers"])
    return [
        (prompt, answer, torch.ones_like(answer, dtype=torch.bool))
        for (prompt, _, _), answer in zip(_cut_own_answers(batch), answers, strict=True)
    ]


def _build_rows(sequences: list[Sequence]) -> TensorDict:
    columns = {
        name: ragged_from_rows([row[place] for row in sequences], dtype=dtype)
        for place, (name, dtype) in enumerate(_COLUMNS.items())
    }
    return TensorDict(columns, batch_size=[len(sequences)])


_COLUMNS = {"prompts": torch.int64, "responses": torch.int64, "response_mask": torch.bool}


def _pair_up(x: Tensor) -> Tensor:
    """(2n,) in the order of `answer_rows` -> (n, 2)."""
    return x.view(2, len(x) // 2).T


def _pair_metrics(rewards: Tensor) -> dict[str, Mean]:
    """Means over pairs of implicit rewards (n, 2)."""
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        "accuracy": _mean(_accuracies(margins)),
        "margin": _mean(margins),
        "chosen_reward": _mean(rewards[:, 0]),
        "rejected_reward": _mean(rewards[:, 1]),
    }


def _accuracies(margins: Tensor) -> Tensor:
    """Of each pair: 1 if the chosen answer is ahead, 0.5 if both are equal, else 0."""
    return (margins > 0).double() + 0.5 * (margins == 0).double()


def _add_means(metrics: list[dict[str, Mean]]) -> dict[str, Mean]:
    """The same means over the rows of all of them."""
    names = metrics[0] if metrics else {}
    return {n: Mean(*map(sum, zip(*(found[n] for found in metrics)))) for n in names}


def _mean(x: Tensor) -> Mean:
    return Mean(float(x.double().sum()), len(x))


def pair_rows(batch: TensorDict) -> TensorDict:
    """n pairs -> 2n sequences: row i is the chosen one of pair i, row n + i the rejected one."""
    both, cuts = rows_of(batch["prompts"]), batch["chosen_tokens"].tolist()
    sequences = [row[:cut] for row, cut in zip(both, cuts)]
    sequences += [row[cut:] for row, cut in zip(both, cuts)]
    rows: TensorDict = text_rows(ragged_from_rows(sequences, dtype=torch.int64)).exclude("is_text")
    return rows
