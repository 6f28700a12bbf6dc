"""Preference losses by name: of pairs of answers, and of answers with a label (KTO).

A loss of pairs is a function `(pair, cfg) -> (n,)`, one loss for each pair, whose arguments are
summed log-probabilities in nats; a script adds its own at module level. With h = beta * (log pi(y)
- log pi_ref(y)) a policy's implicit reward of a whole answer (Rafailov et al. 2023, eq. 5, without
the term of the prompt, which cancels between two answers), h_c and h_r are those of the chosen and
the rejected answer. A reward model compares its scores instead (`bradley_terry`). Losses use
logsigmoid and sigmoid, never exp, so they are finite for any log-ratio.

An engine trains with `PairLoss`, for pairs whose two sequences may be in different micro-batches,
or with `LabelLoss`, for independent rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdflow.config.offline import PreferenceLossConfig
from spmdflow.kind.registry import Registry
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.objectives.loss import Loss, Micro
from spmdflow.objectives.supervised import row_losses


class AnswerPair(NamedTuple):
    """Log-probabilities of n pairs, each (n,), in nats: sums over tokens, or means if per_token."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """(n,): log pi / pi_ref of the chosen answer minus that of the rejected one."""
        return (self.chosen - self.ref_chosen) - (self.rejected - self.ref_rejected)


PREFERENCE_LOSSES: Registry[Callable[..., Tensor]] = Registry(
    "preference loss", "loss.name", decorator="preference_loss({name!r})"
)
"""Losses of pairs, and kto, which has other arguments and is called by `LabelLoss`."""

preference_loss = PREFERENCE_LOSSES.register
"""`@preference_loss("name")` on `fn(pair, cfg) -> (n,)`, pair an `AnswerPair`; then
`actor.loss.name=name`."""


@preference_loss("dpo")
def dpo(pair: AnswerPair, cfg: PreferenceLossConfig) -> Tensor:
    """-(1 - e) log sigmoid(h_c - h_r) - e log sigmoid(h_r - h_c), e = label_smoothing.

    DPO (Rafailov et al. 2023, eq. 7); log 2 at pi = pi_ref. e: the assumed share of wrong labels
    (conservative DPO, Mitchell 2023).
    """
    margin = cfg.beta * pair.log_ratio
    smoothing = cfg.label_smoothing
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


@preference_loss("ipo")
def ipo(pair: AnswerPair, cfg: PreferenceLossConfig) -> Tensor:
    """((log pi/pi_ref)_c - (log pi/pi_ref)_r - 1 / (2 beta))^2 (Azar et al. 2024, eq. 17).

    beta is the paper's tau.
    """
    return (pair.log_ratio - 1 / (2 * cfg.beta)).square()


@preference_loss("slic")
def slic(pair: AnswerPair, cfg: PreferenceLossConfig) -> Tensor:
    """max(0, 1 - beta (log pi(y_c) - log pi(y_r))).

    SLiC-HF's calibration term (Zhao et al. 2023, eq. 1), with its margin delta = 1 / beta and
    scaled by beta.
    """
    return torch.relu(1 - cfg.beta * (pair.chosen - pair.rejected))


@preference_loss("hinge")
def hinge(pair: AnswerPair, cfg: PreferenceLossConfig) -> Tensor:
    """max(0, 1 - (h_c - h_r)); 1 at pi = pi_ref.

    SLiC's hinge on the log-ratios to a reference (hinge-norm of Liu et al. 2024, RSO).
    """
    return torch.relu(1 - cfg.beta * pair.log_ratio)


@preference_loss("kto")
def kto(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    kl: Tensor,
    cfg: PreferenceLossConfig,
) -> Tensor:
    """Return w (1 - sigmoid(+-(h - beta KL))): + for desirable answers, - for others; (n,).

    h = beta (log_probs - ref_log_probs), w = cfg.desirable_weight or undesirable_weight. KTO
    (Ethayarajh et al. 2024, section 4.1). desirable: (n,) bool; kl: scalar estimate of KL(pi ||
    pi_ref) in nats, which passes no gradient and counts as 0 if it is negative.
    """
    gain = cfg.beta * (log_probs - ref_log_probs - kl.detach().clamp(min=0))
    signed = torch.where(desirable, gain, -gain)
    weight = torch.where(desirable, cfg.desirable_weight, cfg.undesirable_weight)
    return weight * (1 - torch.sigmoid(signed))


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(s_chosen - s_rejected): (n,), (n,) -> (n,); log 2 where they are equal.

    Bradley and Terry 1952; as a reward model's loss Ouyang et al. 2022, eq. 1.
    """
    return -logsigmoid(chosen - rejected)


def answer_log_probs(output: CausalOutput, micro: Micro) -> Tensor:
    """(b,): log pi(answer | prompt) in nats, summed over response_mask.

    0 for a row without a learnt token. At temperature 1, as in all of the papers.
    """
    return -row_losses(output, micro)


def last_score(output: ScalarOutput, micro: Micro) -> Tensor:
    """(b,): a reward model's score of each sequence, at its last token."""
    return output.at(micro.ends)


def implicit_rewards(log_probs: Tensor, ref_log_probs: Tensor, cfg: PreferenceLossConfig) -> Tensor:
    """beta (log pi - log pi_ref), of any shape: implicit rewards (Rafailov et al. 2023, eq. 5)."""
    return cfg.beta * (log_probs - ref_log_probs)


SequenceScore = Callable[[Any, Micro], Tensor]
"""(a model's output, its micro-batch) -> (b,): what a loss of pairs compares."""


class PairLoss(Loss):
    """The mean loss of pairs whose two sequences may lie in different micro-batches.

    A previous forward at the same weights, without gradient, computed each pair's loss and its
    derivatives with respect to both scores (`score_slopes`). The terms
    loss / 2 + slope_i * (s_i - stop(s_i)) of both sequences add up to the pair's loss and its exact
    gradient. Reads pair_losses and score_slopes, each (B,).
    """

    def __init__(self, score: SequenceScore = last_score) -> None:
        """score: the function whose results are compared. The columns must come from the same."""
        self._score = score

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Local "pairs": two sequences each."""
        return {"pairs": batch.batch_size[0] / 2}

    def __call__(
        self, output: Any, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch, and no metrics. output: the model's output, for `score`."""
        score = self._score(output, micro)
        slope = micro.columns["score_slopes"]
        shares = micro.columns["pair_losses"] / 2 + slope * (score - score.detach())
        return shares.sum() / max(totals["pairs"], 1.0), {}


def score_slopes(
    chosen: Tensor, rejected: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = bradley_terry
) -> tuple[Tensor, Tensor]:
    """Return the losses (n,) of pairs and their derivatives (2n,) by the scores, both detached.

    The derivatives are those of all chosen, then of all rejected scores. loss: (n,), (n,) -> (n,),
    each pair independently.
    """
    scores = torch.cat([chosen, rejected]).detach().requires_grad_()
    with torch.enable_grad():
        losses = loss(*scores.chunk(2))
        (slopes,) = torch.autograd.grad(losses.sum(), scores)
    return losses.detach(), slopes


def pair_losses(
    log_probs: Tensor, ref_log_probs: Tensor, tokens: Tensor, cfg: PreferenceLossConfig
) -> tuple[Tensor, Tensor]:
    """Return the losses (n,) of pairs and their derivatives (n, 2) by log_probs.

    All tensors are (n, 2) with columns chosen, rejected. The loss is the one that cfg.name selects.
    With cfg.per_token, log-probabilities are first divided by tokens, the number of learnt tokens
    of each answer (at least 1). Empty results for n = 0. ConfigError for an unknown name.
    """
    if not len(log_probs):
        return log_probs.sum(-1), log_probs
    terms = PREFERENCE_LOSSES.find(cfg.name)
    lengths = tokens.clamp(min=1) if cfg.per_token else torch.ones_like(tokens)
    ref = ref_log_probs / lengths

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        pair = AnswerPair(chosen / lengths[:, 0], rejected / lengths[:, 1], ref[:, 0], ref[:, 1])
        return terms(pair, cfg)

    losses, slopes = score_slopes(log_probs[:, 0], log_probs[:, 1], loss)
    return losses, slopes.view(2, len(losses)).T


class LabelLoss(Loss):
    """KTO over a mini-batch: each answer is labelled good or bad (Ethayarajh et al. 2024, 4.1).

    L = 1/n sum_i w_i (1 - sigmoid(+-(h_i - beta z))),  z = max(0, 1/n sum_i kl_i)

    kl_i = log pi - log pi_ref of row i's prompt with another row's answer: z is the paper's
    estimate of KL(pi || pi_ref), here over the rows of the mini-batch on all ranks; no gradient.
    Reads ref_answer_log_probs (B, 2), of which the first is the row's own, kl_log_ratios (B,) in
    nats and desirable (B,).
    """

    def __init__(self, cfg: PreferenceLossConfig) -> None:
        self._cfg = cfg

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Return this rank's numbers of "rows", "desirable" and "undesirable" rows, and "kl".

        kl is the sum of kl_log_ratios in nats. The engine sums all of them over the ranks.
        """
        desirable = float(batch["desirable"].sum())
        rows = float(batch.batch_size[0])
        return {
            "rows": rows,
            "desirable": desirable,
            "undesirable": rows - desirable,
            "kl": float(batch["kl_log_ratios"].double().sum()),
        }

    def __call__(
        self, output: CausalOutput, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch.

        Metrics: kl (nats, not below 0) and the mean implicit rewards of both kinds of answers.
        """
        cfg = self._cfg
        good = micro.columns["desirable"].bool()
        log_probs = answer_log_probs(output, micro)
        ref = micro.columns["ref_answer_log_probs"][:, 0]
        kl = log_probs.new_tensor(totals["kl"] / max(totals["rows"], 1.0))
        losses = kto(log_probs, ref, good, kl, cfg)
        real = micro.row_weight / max(totals["rows"], 1.0)
        reward = implicit_rewards(log_probs.detach(), ref, cfg) * micro.row_weight
        return (losses * real).sum(), {
            "kl": (kl.clamp(min=0) * real).sum(),
            "desirable_reward": reward[good].sum() / max(totals["desirable"], 1.0),
            "undesirable_reward": reward[~good].sum() / max(totals["undesirable"], 1.0),
        }
