"""What the roles that generate share: seeds of rows and what is reported."""

from __future__ import annotations

from torch import Tensor

from spmdflow.data.row_id import is_held_out
from spmdflow.data.rows import total_length
from spmdflow.data.seed import seed_of
from spmdflow.transfer.worker import CallInfo, Mean, Metric, Sum, WorkerContext


def row_seeds(context: WorkerContext, call: CallInfo) -> list[int]:
    """A seed for each row of a call, from (seed, step, row id), never from a rank.

    Held-out rows have the same seed at every step: evaluations differ by their weights only.
    """
    return [
        seed_of(context.seed, "generate", 0 if is_held_out(row) else call.step, row)
        for row in call.row_ids.tolist()
    ]


def rollout_metrics(prompts: Tensor, responses: Tensor) -> dict[str, Metric]:
    """Tokens in and out of ragged columns."""
    rows, tokens = prompts.shape[0], total_length(responses)
    return {
        "rollout/prompt_tokens": Sum(total_length(prompts)),
        "rollout/response_tokens": Sum(tokens),
        "rollout/response_length": Mean(tokens, rows),
    }
