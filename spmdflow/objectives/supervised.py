"""Supervised fine-tuning: the cross-entropy of the learnt tokens.

L = - sum_i sum_{t in M_i} log pi(y_it | y_i,<t) / sum_i |M_i|

M_i: tokens of row i that are to be imitated (the answers; response_mask). Every such token of the
mini-batch counts the same, whichever row, micro-batch or rank it is in (the demonstrations of
Ouyang et al. 2022, section 3.5).
"""

from __future__ import annotations

from collections.abc import Mapping

from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import pad
from spmdflow.objectives.log_prob import log_probs_from_logits
from spmdflow.objectives.loss import Micro
from spmdflow.objectives.reduction import aggregate, inside, mask_totals


def row_losses(output: Tensor, micro: Micro) -> Tensor:
    """(b,): nats of the learnt tokens of each row; output: logits (b, T, V)."""
    log_probs = micro.gather(log_probs_from_logits(output, micro.next_ids))
    return -inside(log_probs, micro.response_mask).sum(-1)


class SupervisedLoss:
    """Mean cross-entropy of the learnt tokens, at temperature 1."""

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Local "tokens" and "sequences" of response_mask."""
        return mask_totals(pad(batch["response_mask"]).sum(-1))

    def __call__(
        self, output: Tensor, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch and no metric besides; output: logits (b, T, V)."""
        log_probs = micro.gather(log_probs_from_logits(output, micro.next_ids))
        loss = aggregate(-log_probs, micro.response_mask, totals, "token-mean")
        return loss, {}

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Nothing to finish."""
        return metrics
