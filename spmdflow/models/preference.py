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
        """Return the scores of both sequences of all n rows, (n, 2) float32, without gradient.

        rows: 2n sequences, all first ones, then all second ones. None before the last pipeline
        stage. All ranks call it together. The parameters are on the device meanwhile.
        """
        with self.resident("parameters"):
            scores = self._scores(rows, self.engine.count_micro_batches(rows))
        if scores is None:
            return None
        return pair_up(scores)

    def _scores(self, rows: TensorDict, num_micro_batches: int) -> Tensor | None:
        """Return the scores of n sequences, (n,) float32, without gradient.

        None before the last pipeline stage. All ranks call it together, also those without rows.
        """

        def scores(output: Any, micro: MicroBatch) -> dict[str, Tensor]:
            return {"scores": self.score_sequence(output, micro)}

        columns = self.engine.forward(rows, scores, num_micro_batches=num_micro_batches)
        if columns is None:
            return None
        return columns["scores"].float()

    def _step_on_pairs(
        self, rows: TensorDict, slopes_of: Callable[[Tensor], Slopes]
    ) -> Mapping[str, Metric]:
        """Take one optimizer step on n pairs, and return its metrics.

        rows: the 2n sequences of the pairs. They are scored first, without gradient. slopes_of
        turns these scores (n, 2) into losses (n,) and their derivatives (2n,) by the scores, which
        are added to rows in place as pair_losses and score_slopes; `PairLoss` trains on them.
        Pipeline stages before the last have no scores and use zeros.
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
        """Return ref_answer_log_probs (B, 2): log-probabilities of each row's two answers.

        They are in nats, summed over the tokens to learn, at temperature 1. The second answer of a
        labelled row is another row's. None before the last pipeline stage.
        """
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
        """Return margins (B,): the implicit reward of the chosen minus that of the rejected answer.

        Of a labelled row: its answer's implicit reward, negated if the answer is undesirable. Pairs
        report loss, accuracy (equal rewards count half), margin, chosen_reward and rejected_reward.
        Labelled rows report desirable_reward, undesirable_reward and kl, the mean log-ratio of
        other rows' answers, which may be negative. All are means, named prefix/... None before the
        last pipeline stage.
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
        """Take one optimizer step for each mini-batch, and return the mean metrics of these steps.

        A step first scores its rows without gradient: both answers of pairs, for the derivatives of
        the loss by their scores; other rows' answers for labelled rows, for the KL. For pairs,
        accuracy, margin and both rewards are reported as means over all pairs, from these scores
        before each step.
        """
        if not is_pairs(batch):
            return self.take_steps(batch, self._label_step, prefix="actor")
        seen: list[dict[str, Mean]] = []

        def step(rows: TensorDict, num_micro_batches: int) -> Mapping[str, Metric]:
            """Take one optimizer step on the pairs of a mini-batch, and return its metrics."""
            ref = rows["ref_answer_log_probs"]
            answers = answer_rows(rows)

            def slopes_of(scores: Tensor) -> Slopes:
                """Return the losses (n,) and their derivatives (2n,) by the scores (n, 2).

                The derivatives of all chosen answers come first. Appends the pairs' metrics to
                `seen`.
                """
                seen.append(_pair_metrics(implicit_rewards(scores, ref, self._preference)))
                tokens = answer_tokens(answers)
                losses, slopes = pair_losses(scores, ref, tokens, self._preference)
                return losses, slopes.T.reshape(-1)

            return self._step_on_pairs(answers, slopes_of)

        metrics = self.take_steps(batch, step, prefix="actor")
        self.report({f"actor/{name}": mean for name, mean in _add_means(seen).items()})
        return metrics

    def _label_step(self, batch: TensorDict, num_micro_batches: int) -> Mapping[str, Metric]:
        """Take one optimizer step on labelled rows with `LabelLoss`, and return its metrics.

        Before it, other rows' answers are scored without gradient. Their log-ratios to the
        reference estimate the KL (zeros before the last pipeline stage).
        """
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
        """Return margins (B,): score of the chosen minus score of the rejected sequence.

        Reports the mean loss -log sigmoid(margin), the mean margin and the accuracy (equal scores
        count half), named prefix/... None before the last pipeline stage.
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
        """Take one optimizer step for each mini-batch, and return the mean metrics of these steps.

        A step first scores its pairs without gradient, for the derivatives of the loss by the
        scores.
        """

        def slopes_of(scores: Tensor) -> Slopes:
            if len(scores):
                return score_slopes(*scores.T)
            return (scores[:, 0], scores.reshape(-1))

        def step(rows: TensorDict, num_micro_batches: int) -> Mapping[str, Metric]:
            return self._step_on_pairs(pair_rows(rows), slopes_of)

        return self.take_steps(batch, step, prefix=self.role)


def preference_loss_of(cfg: Any) -> PreferenceLossConfig:
    """Return the settings of a policy's preference loss: cfg.preference or, without it, cfg.loss.

    ConfigError if they are not a PreferenceLossConfig. Any: the class of cfg is the user's.
    """
    loss = getattr(cfg, "preference", cfg.loss)
    if not isinstance(loss, PreferenceLossConfig):
        got = f"{type(cfg).__name__}, whose loss is a {type(loss).__name__}"
        do = "give it a section `preference: PreferenceLossConfig = "
        do += "part(PreferenceLossConfig)`"
        raise ConfigError.of("PreferenceWorker", got, "a PreferenceLossConfig", do)
    return loss


def _pair_metrics(rewards: Tensor) -> dict[str, Mean]:
    """Return the means over n pairs of accuracy, margin, chosen_reward and rejected_reward.

    rewards: implicit rewards (n, 2), chosen first. A pair of equal rewards has accuracy 0.5.
    """
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
    """Add up means by name: totals and weights are summed over all entries.

    The names are those of the first entry. {} without entries.
    """
    names = metrics[0] if metrics else {}
    result = {}
    for n in names:
        result[n] = Mean(*map(sum, zip(*(means[n] for means in metrics))))
    return result


def _mean(x: Tensor) -> Mean:
    return Mean(float(x.double().sum()), len(x))
