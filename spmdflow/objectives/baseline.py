"""Scores of other responses to the same prompts, as the baseline of a batch's advantages."""

from __future__ import annotations

from tensordict import TensorDict

from spmdflow.objectives.advantage import Report
from spmdflow.objectives.reduction import Reduce
from spmdflow.transfer.row_maths import row_maths


@row_maths(reads=("scores",), writes=("baseline_scores",))
def as_baseline(batch: TensorDict, *, reduce: Reduce, report: Report) -> TensorDict:
    """baseline_scores (B,): the scores, under the name that the estimator `remax` reads.

    Li et al. 2024: the score of the greedy response, b(x) = r(x, argmax_y pi(y | x)).
    """
    return TensorDict({"baseline_scores": batch["scores"]}, batch_size=batch.batch_size)
