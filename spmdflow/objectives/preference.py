"""Preference losses: pure functions of scores or log-probabilities of pairs, one loss per pair.

m = s_chosen - s_rejected is the margin of a reward model. For a policy, h = beta * (log pi(y) -
log pi_ref(y)) is its implicit reward of a whole answer (Rafailov et al. 2023, eq. 5, without the
term of the prompt, which cancels between two answers). Log-probabilities are sums over an answer's
tokens, in nats. None of the losses takes an exp: extreme log-ratios stay finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdflow.objectives.loss import Micro


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(s_chosen - s_rejected): (n,), (n,) -> (n,); log 2 where they are equal.

    Bradley and Terry 1952; as a reward model's loss Ouyang et al. 2022, eq. 1.
    """
    return -logsigmoid(chosen - rejected)


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-(1 - e) log sigmoid(h_c - h_r) - e log sigmoid(h_r - h_c): summed log-probs (n,) -> (n,).

    DPO (Rafailov et al. 2023, eq. 7), log 2 at pi = pi_ref. e: the share of labels that are wrong
    (conservative DPO, Mitchell 2023).
    """
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float
) -> Tensor:
    """((log pi/pi_ref)_c - (log pi/pi_ref)_r - 1 / (2 beta))^2: summed log-probs (n,) -> (n,).

    IPO (Azar et al. 2024, eq. 17); beta is its tau.
    """
    return ((chosen - ref_chosen) - (rejected - ref_rejected) - 1 / (2 * beta)).square()


def slic(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - beta (log pi(y_c) - log pi(y_r))): summed log-probs (n,) -> (n,).

    SLiC-HF's calibration term (Zhao et al. 2023, eq. 1), with its margin delta = 1 / beta and
    scaled by beta.
    """
    return torch.relu(1 - beta * (chosen - rejected))


def hinge(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float
) -> Tensor:
    """max(0, 1 - (h_c - h_r)): summed log-probs (n,) -> (n,).

    SLiC's hinge on the log-ratios to a reference (hinge-norm of Liu et al. 2024, RSO); 1 at
    pi = pi_ref.
    """
    return torch.relu(1 - beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def kto(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w (1 - sigmoid(+-(h - beta KL))): + for desirable answers, - for others; (n,) -> (n,).

    KTO (Ethayarajh et al. 2024, section 4.1). desirable: (n,) bool; kl: scalar estimate of KL(pi ||
    pi_ref) in nats, which passes no gradient and counts as 0 if it is negative.
    """
    gain = beta * (log_probs - ref_log_probs - kl.detach().clamp(min=0))
    signed = torch.where(desirable, gain, -gain)
    weight = torch.where(desirable, desirable_weight, undesirable_weight)
    return weight * (1 - torch.sigmoid(signed))


SequenceScore = Callable[[Tensor, Micro], Tensor]
"""(a model's output, its micro-batch) -> (b,): what a loss of pairs compares."""


def last_score(output: Tensor, micro: Micro) -> Tensor:
    """(b, T) -> (b,): a reward model's score of a sequence, the one of its last token."""
    return micro.last(output)


class PairLoss:
    """The mean loss of pairs whose two sequences may lie in different micro-batches.

    Each pair's loss and its slope at both scores come along as columns (`score_slopes`), taken at
    the same weights: loss_i / 2 + slope_i * (s_i - stop(s_i)) of each sequence adds up to the
    pair's loss, and to its exact gradient. Reads pair_losses and score_slopes, each (B,).
    """

    def __init__(self, score: SequenceScore = last_score) -> None:
        """score: what is compared; the columns must have been made with the same one."""
        self._score = score

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Local "pairs": two sequences each."""
        return {"pairs": batch.batch_size[0] / 2}

    def __call__(
        self, output: Tensor, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch and no metric besides; output: what `score` reads."""
        score = self._score(output, micro)
        slope = micro.columns["score_slopes"]
        shares = micro.columns["pair_losses"] / 2 + slope * (score - score.detach())
        return shares.sum() / max(totals["pairs"], 1.0), {}

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Nothing to finish."""
        return metrics


def score_slopes(
    chosen: Tensor, rejected: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = bradley_terry
) -> tuple[Tensor, Tensor]:
    """Losses (n,) of pairs, and their derivatives at (chosen, rejected), (2n,).

    loss: (n,), (n,) -> (n,), each pair by itself. Nothing of it reaches the graph.
    """
    scores = torch.cat([chosen, rejected]).detach().requires_grad_()
    with torch.enable_grad():
        losses = loss(*scores.chunk(2))
        (slopes,) = torch.autograd.grad(losses.sum(), scores)
    return losses.detach(), slopes
