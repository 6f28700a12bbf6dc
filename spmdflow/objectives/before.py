"""What is known of a policy before an update, from the forwards of the update itself."""

from __future__ import annotations

import torch
from torch import Tensor

from spmdflow.objectives.kl import kl_estimate
from spmdflow.objectives.loss import Micro, inside, masked_sum
from spmdflow.transfer.worker import Max, Mean, Metric


class Before:
    """Sums over a rank's rows, while the weights are those of before the update.

    Metrics, those of a forward of its own: actor/entropy; rollout/drift and drift_max if the rows
    bring rollout_log_probs; actor/reference_kl (k1) per token and per response if with_reference
    and they bring ref_log_probs. No waits for a device before `metrics`.
    """

    def __init__(self, *, with_reference: bool) -> None:
        self._with_reference = with_reference
        self._sums: dict[str, Tensor] = {}
        self._largest: list[Tensor] = []

    def add(self, log_probs: Tensor, entropy: Tensor, micro: Micro) -> None:
        """A micro-batch; log_probs and entropy: (b, R), of the trainer, without gradient."""
        mask, columns = micro.response_mask, micro.columns
        found = {"tokens": mask.sum(), "rows": mask.any(-1).sum()}
        found["actor/entropy"] = masked_sum(entropy, mask)
        if "rollout_log_probs" in columns:
            gap = inside((columns["rollout_log_probs"] - log_probs).abs(), mask)
            found["rollout/drift"] = gap.sum()
            self._largest.append(gap.max())
        if self._with_reference and "ref_log_probs" in columns:
            kl = kl_estimate("k1", log_probs.double(), columns["ref_log_probs"].double())
            found["actor/reference_kl"] = masked_sum(kl, mask)
        for name, total in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + total.double()

    def metrics(self) -> dict[str, Metric]:
        """What the rank reports; empty before the last pipeline stage."""
        sums = {name: float(total) for name, total in self._sums.items()}
        tokens, rows = sums.pop("tokens", 0.0), sums.pop("rows", 0.0)
        found: dict[str, Metric] = {name: Mean(total, tokens) for name, total in sums.items()}
        if "actor/reference_kl" in sums:
            total = sums["actor/reference_kl"]
            found["actor/reference_kl_per_response"] = Mean(total, rows)
        if self._largest:
            found["rollout/drift_max"] = Max(float(torch.stack(self._largest).max()))
        return found
