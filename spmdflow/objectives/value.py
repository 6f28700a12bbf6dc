"""The critic's clipped squared error, and how much of the returns it explains."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import ValueLossConfig
from spmdflow.data.ragged import pad
from spmdflow.objectives.loss import Micro, aggregate, inside, mask_totals


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """(loss, clipped), each (B, R): 1/2 max((V - R)^2, (V_clip - R)^2).

    V_clip = V_old + clip(V - V_old, -range, range): one update may not move a value far (the
    value clipping of PPO's reference code; Huang et al. 2022, detail 9). None: plain error.
    """
    free = (values - returns).square()
    if clip_range is None:
        return free / 2, torch.zeros_like(free, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    held = (near - returns).square()
    return torch.maximum(free, held) / 2, held > free


class ValueLoss:
    """Token mean of the clipped value loss.

    Reads values (of before the update) and returns. Metrics: critic/loss, clip_fraction,
    value_mean, return_mean, and explained_variance = 1 - Var(R - V_old) / Var(R), of the values
    that were predicted before the returns were seen (0 if the returns do not vary).
    """

    def __init__(self, cfg: ValueLossConfig) -> None:
        self.cfg = cfg

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Local "tokens" and "sequences" of response_mask."""
        return mask_totals(pad(batch["response_mask"]).sum(-1))

    def __call__(
        self, output: Tensor, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch; output: values (b, T)."""
        old_values, returns = (
            inside(micro.columns[name], micro.response_mask) for name in ("values", "returns")
        )
        values = micro.gather(output).float()  # (b, T) -> (b, R)
        losses, clipped = clipped_value_loss(values, old_values, returns, self.cfg.clip_range)
        loss = aggregate(losses, micro.response_mask, totals, "token-mean")
        error, target = (returns - old_values).double(), returns.double()
        means = {
            "critic/clip_fraction": clipped.float(),
            "critic/value_mean": values.detach(),
            "critic/return_mean": target,
            "critic/return_square": target.square(),
            "critic/error_mean": error,
            "critic/error_square": error.square(),
        }
        metrics = {"critic/loss": loss.detach()} | {
            name: aggregate(x, micro.response_mask, totals, "token-mean")
            for name, x in means.items()
        }
        return loss, metrics

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Turn the moments of returns and errors into the explained variance."""
        error = metrics.pop("critic/error_square") - metrics.pop("critic/error_mean") ** 2
        spread = metrics.pop("critic/return_square") - metrics["critic/return_mean"] ** 2
        metrics["critic/explained_variance"] = 1 - error / spread if spread > 1e-12 else 0.0
        return metrics
