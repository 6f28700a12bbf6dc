"""Soft overlong punishment: a response that nears the limit of its length loses score.

A composition for scores of any source: it is added to the reward of the last token, after the
scores are known. The one file of this room that knows batches.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import OverlongConfig
from spmdflow.data.ragged import lengths_of, ragged
from spmdflow.data.rows import VALID, valid_rows
from spmdflow.objectives.advantage import Report
from spmdflow.objectives.reduction import Reduce
from spmdflow.transfer.row_maths import row_maths
from spmdflow.transfer.worker import Mean


def overlong_penalty(num_tokens: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """R(y) of DAPO (Yu et al. 2025, eq. 13), for responses of |y| = num_tokens tokens, in [-1, 0].

    With L = max_tokens and C = buffer_tokens: 0 up to |y| = L - C, (L - C - |y|) / C up to L, -1
    beyond. C = 0 punishes nothing but |y| > L.
    """
    beyond = num_tokens - (max_tokens - buffer_tokens)
    return -(beyond.double() / max(buffer_tokens, 1)).clamp(0, 1)


@row_maths(reads=("token_level_rewards",), optional=VALID, writes=("token_level_rewards",))
def add_overlong_penalty(
    batch: TensorDict, *, cfg: OverlongConfig, max_tokens: int, reduce: Reduce, report: Report
) -> TensorDict:
    """token_level_rewards with weight * R(y) added at the last token.

    Reports reward/overlong, the mean of what was added to rows that did not fail.
    """
    rewards = batch["token_level_rewards"]
    lengths = lengths_of(rewards)
    penalty = cfg.weight * overlong_penalty(
        lengths, max_tokens=max_tokens, buffer_tokens=cfg.buffer_tokens
    )
    values = rewards.values().clone()
    ends = torch.cumsum(lengths, 0) - 1
    some = lengths > 0
    values[ends[some]] += penalty[some].to(values.dtype)
    valid = valid_rows(batch)
    counted = penalty if valid is None else penalty[valid]
    report({"reward/overlong": Mean(float(counted.sum()), float(len(counted)))})
    return TensorDict({"token_level_rewards": ragged(values, lengths)}, batch.batch_size)
