"""What an engine asks of a loss, and what a loss may ask of a micro-batch.

A train step sums `loss(output, micro, totals)` over the micro-batches of all ranks. Every term is
divided by a *global* denominator, so the sum is the mean over the whole mini-batch, however the
rows were spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tensordict import TensorDict
from torch import Tensor


class Micro(Protocol):
    """The rows of one forward, padded."""

    @property
    def next_ids(self) -> Tensor:
        """(b, T) int64: the token that position t predicts."""

    @property
    def attention_mask(self) -> Tensor:
        """(b, T) bool: True at real tokens."""

    @property
    def response_mask(self) -> Tensor:
        """(b, R) bool: True where the policy chose the token; rows of weight 0 are all False."""

    @property
    def row_weight(self) -> Tensor:
        """(b,) float32: 1, or 0 for a padding row."""

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """The batch's columns: response-shaped (b, R) or dense (b, ...)."""

    def gather(self, x: Tensor) -> Tensor:
        """(b, T) -> (b, R): x at the position that predicts each response token."""

    def last(self, x: Tensor) -> Tensor:
        """(b, T) -> (b,): x at the last real token of each row."""


class Loss(Protocol):
    """A loss object for `train_step`."""

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Sums over this rank's rows of the mini-batch; the engine adds up those of all ranks."""

    def __call__(
        self, output: Tensor, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(scalar to differentiate, metrics): sums over the rows divided by global totals.

        The scalar must depend on output even if every mask is False (padding runs backward too).
        """

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics to report from the globally summed ones, such as a variance from moments."""
