"""Cross-entropy of given text: examples to imitate, and pre-training text mixed into PPO (PPO-ptx).

Supervised fine-tuning:  L = - sum_i sum_{t in M_i} log pi(y_it | y_i,<t) / sum_i |M_i|

M_i: tokens of row i that are to be imitated (the answers; response_mask). Every such token of the
mini-batch counts the same, whichever row, micro-batch or rank it is in (the demonstrations of
Ouyang et al. 2022, section 3.5).

PPO-ptx:  L = L_policy + coef * L_text,  L_text = - sum log pi(x_{t+1} | x_1..t) / number of such t

(Ouyang et al. 2022, eq. 2; Dai et al. 2024, appendix B). A text is a row with a prompt of one
token, no token that the policy chose, and `is_text` True. Each loss has its own global denominator,
so a mini-batch may have any number of samples and texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import lengths_of
from spmdflow.objectives.log_prob import CausalOutput
from spmdflow.objectives.loss import Loss, Micro, aggregate, masked_sum, zero_outside
from spmdflow.objectives.policy import PolicyLoss


def row_losses(output: CausalOutput, micro: Micro) -> Tensor:
    """(b,): cross-entropy of each row in nats, summed over its learnt tokens."""
    return -zero_outside(micro.spread(output.log_probs()), micro.response_mask).sum(-1)


class SupervisedLoss(Loss):
    """Mean cross-entropy of the learnt tokens, at temperature 1."""

    def __call__(
        self, output: CausalOutput, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch, and no metrics."""
        log_probs = micro.spread(output.log_probs())
        loss = aggregate(-log_probs, micro.response_mask, totals, "token-mean")
        return loss, {}


class PretrainedPolicyLoss(Loss):
    """A policy loss of the samples plus coef times the cross-entropy of the texts.

    Reads is_text (B,) bool and the policy loss's columns. Metrics: those of the policy loss, and
    actor/pretrain_loss in nats per token (0 without a text).
    """

    def __init__(self, policy: PolicyLoss, coef: float) -> None:
        self._policy = policy
        self._coef = coef

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """The denominators of the policy loss, and "text_tokens"."""
        predicted = lengths_of(batch["responses"]) * batch["is_text"]
        return self._policy.denominators(batch) | {"text_tokens": float(predicted.sum())}

    def __call__(
        self, output: CausalOutput, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch."""
        loss, metrics = self._policy(output, micro, totals)
        mask = micro.response_tokens & micro.columns["is_text"].bool()[:, None]
        log_probs = micro.spread(output.log_probs())  # at temperature 1
        text = -masked_sum(log_probs, mask) / max(totals["text_tokens"], 1.0)
        return loss + self._coef * text, metrics | {"actor/pretrain_loss": text.detach()}

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Finalize the metrics of the policy loss."""
        return self._policy.finalize(metrics)
