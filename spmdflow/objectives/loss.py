"""The interfaces of losses (`Loss`) and of micro-batches (`Micro`), and means over masks.

A train step sums `loss(output, micro, totals)` over the micro-batches of all ranks. Every term is
divided by a *global* denominator, so the sum is the mean over the whole mini-batch, however the
rows are spread. This module does not know ranks: sums over them go through `reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ROW_WEIGHTS, pad
from spmdflow.errors import ProtocolError
from spmdflow.kind.registry import Registry
from spmdflow.worker_api.metric import Metric


class Micro(Protocol):
    """The rows of one forward."""

    @property
    def predicting(self) -> Tensor:
        """(n,) int64: positions that predict a response token, for `ScalarOutput.at`."""

    @property
    def ends(self) -> Tensor:
        """(b,) int64: positions of the rows' last tokens, for `ScalarOutput.at`."""

    @property
    def response_tokens(self) -> Tensor:
        """(b, R) bool: True where the response has a token, chosen by the policy or not."""

    @property
    def response_mask(self) -> Tensor:
        """(b, R) bool: True where the policy chose the token; rows of weight 0 are all False."""

    @property
    def rows_of_token(self) -> Tensor:
        """Shape of the tokens of the forward, int32: how many rows have the token; 0: padding."""

    @property
    def row_weight(self) -> Tensor:
        """(b,) float32: 1, or 0 for a padding row."""

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """The batch's columns: response-shaped (b, R) or dense (b, ...)."""

    def spread(self, x: Tensor) -> Tensor:
        """(n,) -> (b, R): one number for each response token; 0 beyond a response."""


class Loss(Protocol):
    """A loss for `train_step`. By default it counts tokens and leaves metrics as they are."""

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Denominators over this rank's rows of the mini-batch; the engine sums them over ranks.

        By default "tokens" and "sequences" of response_mask, with row_weights if the batch has
        them. If all denominators are 0 on all ranks, there is nothing to learn: the loss is not
        called and no optimizer step is taken.
        """
        return mask_totals(pad(batch["response_mask"]).sum(-1), batch.get(ROW_WEIGHTS))

    def __call__(
        self, output: Any, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(scalar to differentiate, metrics): sums over the rows divided by global totals.

        output: a `CausalOutput` or a `ScalarOutput` (objectives.log_prob), depending on the model's
        head. The scalar must depend on output even if every mask is False, because backward also
        runs for micro-batches of padding.
        """

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Turn globally summed metrics into those to report, such as moments into a variance."""
        return metrics


Report = Callable[[Mapping[str, Metric]], None]
"""Receives the metrics of a map function."""

Reduce = Callable[[Tensor], Tensor]
"""Sums a float64 tensor over the ranks that share a batch; all of them must call it."""


def check_returned(where: str, returned: Any, names: Sequence[str], shape: torch.Size) -> Any:
    """Check that a user's function returned one tensor of this shape for each name; return them.

    ProtocolError otherwise. where: the function's decorator, for the error.
    """
    parts = returned if isinstance(returned, tuple) else (returned,)
    shapes = []
    for x in parts:
        shapes.append(tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__)
    if shapes != [tuple(shape)] * len(names):
        got = f"{len(parts)} of {shapes}"
        expected = f"({', '.join(names)}), each {tuple(shape)}"
        raise ProtocolError.of(where, got, expected, "return these tensors as a tuple")
    return returned


def zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    """x with zeros outside mask. Values there, even nan, affect no result or gradient."""
    return torch.where(mask, x, torch.zeros_like(x))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over mask -> scalar. Values outside may even be nan or inf."""
    return zero_outside(x, mask).sum()


def whiten(x: Tensor, mask: Tensor, reduce: Reduce, row_weights: Tensor | None = None) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) over the mask of all ranks; 0 outside it.

    mean = sum x / n and the unbiased var = sum (x - mean)^2 / (n - 1) are taken in float64 over
    every rank (two calls of reduce). A single masked entry whitens to 0. row_weights (B,): how much
    the entries of a row count in n and in the sums; None: 1.
    """
    values = zero_outside(x, mask).double()
    weights = mask.double()
    if row_weights is not None:
        weights = weights * row_weights.double()[:, None]
    count, total = reduce(torch.stack([weights.sum(), (weights * values).sum()]))
    centred = zero_outside(values - total / count.clamp(min=1), mask)
    variance = reduce((weights * centred.square()).sum()) / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + 1e-8)).to(x.dtype)


@dataclass(frozen=True)
class Aggregation:
    """A way to reduce per-token losses to one number: sum(loss * weights(mask)) / totals[total]."""

    weights: Callable[[Tensor], Tensor]
    """(B, R) mask -> (B, R) weights, 0 outside the mask."""
    total: str | None
    """The global denominator: "tokens", "sequences" with at least one token in the mask, or
    "budget", which is sequences times the longest response allowed. None: 1."""


def _each_token(mask: Tensor) -> Tensor:
    return mask.float()


def _each_sequence(mask: Tensor) -> Tensor:
    return mask.float() / mask.sum(-1, keepdim=True).clamp(min=1)


AGGREGATIONS: Registry[Aggregation] = Registry("aggregation", "loss.aggregation")
AGGREGATIONS |= {
    # sum_i sum_t l_it / sum_i |y_i|: every token counts the same (DAPO, Yu et al. 2025, eq. 12)
    "token-mean": Aggregation(_each_token, "tokens"),
    # 1/N sum_i 1/|y_i| sum_t l_it: every sequence counts the same (GRPO, Shao et al. 2024, eq. 3)
    "sequence-mean-token-mean": Aggregation(_each_sequence, "sequences"),
    # 1/N sum_i sum_t l_it: no length bias (Dr. GRPO, Liu et al. 2025)
    "sequence-mean-token-sum": Aggregation(_each_token, "sequences"),
    # 1/(N L) sum_i sum_t l_it, L constant: the same divided by the longest response (ibid., code)
    "sequence-mean-token-sum-by-budget": Aggregation(_each_token, "budget"),
    # sum_i sum_t l_it: the gradient grows with the mini-batch
    "token-sum": Aggregation(_each_token, None),
}


def aggregate(
    x: Tensor,
    mask: Tensor,
    totals: Mapping[str, float],
    mode: str,
    row_weights: Tensor | None = None,
) -> Tensor:
    """This part's share of the global mean of x (B, R) -> scalar; shares add up to the mean.

    totals: global "tokens" and "sequences" (`mask_totals` summed over all ranks), and "budget" for
    the mode that divides by it. mode: a name in AGGREGATIONS. row_weights (B,): how much each row
    counts, as in totals; None: 1.
    """
    chosen = AGGREGATIONS.find(mode)
    total = 1.0 if chosen.total is None else totals[chosen.total]
    if row_weights is None:
        return (zero_outside(x, mask) * chosen.weights(mask)).sum() / max(total, 1.0)
    weights = chosen.weights(mask) * row_weights[:, None]
    return (zero_outside(x, mask) * weights).sum() / (total or 1.0)


def mask_totals(row_sums: Tensor, row_weights: Tensor | None = None) -> dict[str, float]:
    """Local denominators from the number of masked tokens of each row, (B,).

    row_weights (B,): how much each row counts; None: 1.
    """
    if row_weights is None:
        return {"tokens": float(row_sums.sum()), "sequences": float((row_sums > 0).sum())}
    weights = row_weights.double()
    tokens = (row_sums * weights).sum()
    return {"tokens": float(tokens), "sequences": float(weights[row_sums > 0].sum())}
