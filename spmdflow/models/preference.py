"""Models that learn from preferences: a policy, its frozen reference, a reward model.

A row of data gives two sequences. A pair: the prompt with the chosen and with the rejected answer.
A labelled row: the prompt with its own and with another row's answer, for KTO's estimate of the KL.
Each sequence becomes a row (`models.rows`); see `objectives.preference.PairLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.offline import PreferenceActorConfig, PreferenceLossConfig
from spmdflow.errors import ConfigError
from spmdflow.models.base import EngineWorker
from spmdflow.models.rows import (
    answer_rows,
    answer_tokens,
    is_pairs,
    other_answer_rows,
    own_answer_rows,
    pair_rows,
    pair_up,
)
from spmdflow.objectives.preference import (
    PREFERENCE_LOSSES,
    LabelLoss,
    PairLoss,
    SequenceScore,
    answer_log_probs,
    bradley_terry,
    implicit_rewards,
    last_score,
    pair_losses,
    score_slopes,
)
from spmdflow.worker_api.metric import Mean, Metric
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.micro_batch import MicroBatch

ANSWERS = ("prompts", "loss_mask")
KINDS = ("chosen_tokens", "answers", "desirable")
"""Columns of preference rows: all have ANSWERS, pairs or labelled rows some of KINDS."""
Slopes = tuple[Tensor, Tensor]
"""Losses of n pairs (n,), and their derivatives (2n,) by the scores of the 2n sequences."""


class PairWorker(EngineWorker):
    """Shared parts of preference models: scoring both sequences of each row, stepping on pairs."""

    score_sequence: SequenceScore = staticmethod(answer_log_probs)
    """The compared score of a sequence: its answer's log-probability, or a reward model's score."""

    def _score_pairs(self, rows: TensorDict) -> Tensor | None:
        """(n, 2) float32: scores of both sequences of all n rows, given as 2n sequences."""
        with self.resident("parameters"):
            scores = self._scores(rows, self.engine.count_micro_batches(rows))
        if scores is None:
            return None
        return pair_up(scores)

    def _scores(self, rows: TensorDict, num_micro_batches: int) -> Tensor | None:
        """(n,) float32: scores of n sequences; None before the last pipeline stage."""

        def scores(output: Any, micro: MicroBatch) -> dict[str, Tensor]:
            return {"scores": self.score_sequence(output, micro)}

        columns = self.engine.forward(rows, scores, num_micro_batches=num_micro_batches)
        if columns is None:
            return None
        return columns["scores"].float()

    def _step_on_pairs(
        self, rows: TensorDict, slopes_of: Callable[[Tensor], Slopes]
    ) -> Mapping[str, Metric]:
        """One step on n pairs, given as 2n sequences, after a forward without gradient.

        slopes_of: scores (n, 2) -> losses (n,) and their derivatives (2n,) by the scores. Pipeline
        stages before the last have no loss and use zeros.
        """
        forwards = self.engine.count_micro_batches(rows)
        scores = self._scores(rows, forwards)
        slopes = torch.zeros(rows.batch_size)
        losses = slopes[: len(slopes) // 2]
        if scores is not None:
            losses, slopes = slopes_of(pair_up(scores))
        rows["pair_losses"] = torch.cat([losses, losses])
        rows["score_slopes"] = slopes
        loss = PairLoss(self.score_sequence)
        return self.engine.train_step(rows, loss, num_micro_batches=forwards)


class AnswerReferenceWorker(PairWorker):
    """Log-probabilities of answers under the initial policy, which is never updated."""

    role = "reference"
    head = "causal_lm"
    evaluation_columns = "compute_ref_log_prob"

    @register(
        transfer_mode="3D_PROTO", reads=ANSWERS, optional=KINDS, writes=("ref_answer_log_probs",)
    )
    def compute_ref_log_prob(self, batch: TensorDict) -> TensorDict | None:
        """ref_answer_log_probs (B, 2): nats of each row's two answers, summed over tokens."""
        scores = self._score_pairs(answer_rows(batch))
        if scores is None:
            return None
        return TensorDict({"ref_answer_log_probs": scores}, batch_size=batch.batch_size)


class PreferenceWorker(PairWorker):
    """Updates and held-out margins of a policy that learns from preferences.

    Its loss is the section `preference` of its settings or, without one, `loss`. A class that is
    also an ActorWorker has both sections.
    """

    role = "actor"
    head = "causal_lm"
    exports = True
    evaluation = "compute_preference"
    reads: ClassVar[tuple[str, ...]] = (*ANSWERS, "ref_answer_log_probs")

    def __init__(self, cfg: PreferenceActorConfig, context: WorkerContext) -> None:
        super().__init__(cfg, context)
        self._preference = preference_loss_of(cfg)
        PREFERENCE_LOSSES.find(self._preference.name)

    @register(transfer_mode="3D_PROTO", reads=reads, optional=KINDS, writes=("margins",))
    def compute_preference(self, batch: TensorDict, *, prefix: str = "actor") -> TensorDict | None:
        """margins (B,): implicit reward of chosen - rejected; of a labelled row +- its answer's.

        Pairs report loss, accuracy (equal rewards count half), margin and both rewards; labelled
        rows the mean rewards of both kinds and the KL estimate, which may be negative here.
        """
        rows = answer_rows(batch)
        ref = batch["ref_answer_log_probs"]
        scores = self._score_pairs(rows)
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

        A step first scores its rows without gradient: both answers of pairs, for the derivatives of
        the loss by their scores; other rows' answers for labelled rows, for the KL.
        """
        if not is_pairs(batch):
            return self.take_steps(batch, self._label_step, prefix="actor")
        seen: list[dict[str, Mean]] = []

        def step(rows: TensorDict, num_micro_batches: int) -> Mapping[str, Metric]:
            """One step on the pairs of a mini-batch."""
            ref = rows["ref_answer_log_probs"]
            answers = answer_rows(rows)

            def slopes_of(scores: Tensor) -> Slopes:
                """Losses and their derivatives by the scores. Also collects the metrics."""
                seen.append(_pair_metrics(implicit_rewards(scores, ref, self._preference)))
                tokens = answer_tokens(answers)
                losses, slopes = pair_losses(scores, ref, tokens, self._preference)
                return losses, slopes.T.reshape(-1)

            return self._step_on_pairs(answers, slopes_of)

        metrics = self.take_steps(batch, step, prefix="actor")
        self.report({f"actor/{name}": mean for name, mean in _add_means(seen).items()})
        return metrics

    def _label_step(self, batch: TensorDict, num_micro_batches: int) -> Mapping[str, Metric]:
        """One step on labelled rows, after the answers of other rows were scored to estimate the
        KL."""
        ref = batch["ref_answer_log_probs"]
        rows = own_answer_rows(batch)
        other_rows = other_answer_rows(batch)
        others = self._scores(other_rows, self.engine.count_micro_batches(other_rows))
        rows["kl_log_ratios"] = ref[:, 1] * 0 if others is None else others - ref[:, 1]
        loss = LabelLoss(self._preference)
        return self.engine.train_step(rows, loss, num_micro_batches=num_micro_batches)


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
        scores = self._score_pairs(pair_rows(batch))
        if scores is None:
            return None
        chosen, rejected = scores.T
        margins = chosen - rejected
        shown = {"loss": bradley_terry(chosen, rejected), "margin": margins}
        shown["accuracy"] = _accuracies(margins)
        self.report({f"{prefix}/{name}": _mean(x) for name, x in shown.items()})
        return TensorDict({"margins": margins}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("prompts", "chosen_tokens"), minibatches=True)
    def update_reward_model(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps.

        A step first scores its pairs without gradient, for the derivatives of the loss by scores.
        """

        def slopes_of(scores: Tensor) -> Slopes:
            if len(scores):
                return score_slopes(*scores.T)
            return (scores[:, 0], scores.reshape(-1))

        def step(rows: TensorDict, num_micro_batches: int) -> Mapping[str, Metric]:
            return self._step_on_pairs(pair_rows(rows), slopes_of)

        return self.take_steps(batch, step, prefix=self.role)


def preference_loss_of(cfg: Any) -> PreferenceLossConfig:
    """The section `preference` of a policy's settings or, without one, `loss` (Any: the user's
    class)."""
    loss = getattr(cfg, "preference", cfg.loss)
    if not isinstance(loss, PreferenceLossConfig):
        got = f"{type(cfg).__name__}, whose loss is a {type(loss).__name__}"
        do = "give it a section `preference: PreferenceLossConfig = "
        do += "part(PreferenceLossConfig)`"
        raise ConfigError.of("PreferenceWorker", got, "a PreferenceLossConfig", do)
    return loss


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
    """Of each pair: 1 if the chosen answer scores higher, 0.5 if both are equal, otherwise 0."""
    return (margins > 0).double() + 0.5 * (margins == 0).double()


def _add_means(metrics: list[dict[str, Mean]]) -> dict[str, Mean]:
    """The same means over the rows of all entries."""
    names = metrics[0] if metrics else {}
    result = {}
    for n in names:
        result[n] = Mean(*map(sum, zip(*(means[n] for means in metrics))))
    return result


def _mean(x: Tensor) -> Mean:
    return Mean(float(x.double().sum()), len(x))
