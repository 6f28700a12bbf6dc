"""How evenly the tokens of a mini-batch are spread over the experts, and the loss that evens them.

For a layer with E experts of which each token gets k, n_e is the number of tokens of a mini-batch
that get expert e, T the number of tokens, and P_e the mean of the router's probability of e over
the tokens. The auxiliary loss (Fedus et al. 2021, "Switch Transformers", eq. 4 to 6) is

    E * sum_e n_e / T * P_e,

averaged over the layers; k for an even load. n_e counts all rows of the optimizer step on all
ranks (as Qiu et al. 2025, "Demons in the Detail"), so the loss depends neither on the layout nor on
micro-batches. The gradient flows through P_e only. A token that several rows share counts once for
each row, and padding not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.objectives.loss import Loss, Micro
from spmdflow.router import RoutedLayer, Routers
from spmdflow.worker_api.metric import Max, Metric, Min

MOST_LISTED = 64
"""Largest number of experts whose loads are metrics of their own."""

Reduce = Callable[[Tensor], None]
"""Sums a tensor over the ranks that have rows of the mini-batch, in place. They all call it."""


class RouterStatistics:
    """Sums over the tokens of a mini-batch, on the device, in float64."""

    def __init__(self, *, num_layers: int, num_experts: int, device: torch.device) -> None:
        self._sums = torch.zeros(
            num_layers, 2 * num_experts + 2, dtype=torch.float64, device=device
        )
        self.counts = self._sums[:, :num_experts]
        """(layers, E): n_e, the tokens that get each expert."""
        self.probabilities = self._sums[:, num_experts:-2]
        """(layers, E): of the router, summed over tokens."""
        self.entropy = self._sums[:, -2]
        """(layers,): of these probabilities, in nats, summed over tokens."""
        self.num_tokens = self._sums[:, -1]
        """(layers,): T."""

    def add(self, layers: Sequence[RoutedLayer], weights: Tensor) -> None:
        """Add what the routers did in one forward. weights (tokens,): rows that have the token."""
        weights = weights.double()
        for number, layer in enumerate(layers):
            self.add_layer(number, layer, weights)

    def add_layer(self, number: int, layer: RoutedLayer, weights: Tensor) -> None:
        """Add what one router did. number: of its layer. weights (tokens,), in float64."""
        each_choice = weights.repeat_interleave(layer.experts.shape[1])
        self.counts[number].index_add_(0, layer.experts.flatten(), each_choice)
        probabilities = layer.probabilities.detach().double()
        self.probabilities[number] += weights @ probabilities
        self.entropy[number] += weights @ torch.special.entr(probabilities).sum(-1)
        self.num_tokens[number] += weights.sum()

    def sum_over_ranks(self, reduce: Reduce) -> None:
        """Replace all sums by those over the ranks."""
        reduce(self._sums)

    @property
    def shares(self) -> Tensor:
        """(layers, E): n_e / T, which sums to k in each layer; 0 without tokens."""
        return self.counts / self.num_tokens.clamp(min=1)[:, None]

    def metrics(self) -> dict[str, Metric]:
        """Return the loads of the experts, the entropy of the routers and the auxiliary loss.

        A load is an expert's share of the choices of its layer, divided by an equal share.
        expert_load_min and expert_load_max: over all experts and layers. expert_load_N: of expert
        N, averaged over the layers, if there are at most `MOST_LISTED`. router_entropy: nats, mean
        over tokens and layers. router_balance: the auxiliary loss without its weight. {} without
        tokens.
        """
        if not float(self.num_tokens.max()):
            return {}
        num_experts = self.counts.shape[1]
        loads = self.counts / self.counts.sum(1, keepdim=True).clamp(min=1) * num_experts
        tokens = self.num_tokens.clamp(min=1)
        means = self.probabilities / tokens[:, None]
        balance = num_experts * (self.shares * means).sum(1).mean()
        entropy = (self.entropy / tokens).mean()
        facts = torch.stack([loads.min(), loads.max(), entropy, balance]).tolist()
        metrics: dict[str, Metric] = {
            "expert_load_min": Min(facts[0]),
            "expert_load_max": Max(facts[1]),
            "router_entropy": facts[2],
            "router_balance": facts[3],
        }
        if num_experts <= MOST_LISTED:
            for expert, load in enumerate(loads.mean(0).tolist()):
                metrics[f"expert_load_{expert}"] = load
        return metrics


class BalancedLoss(Loss):
    """A loss plus coef times the auxiliary loss. Collects the statistics of the routers.

    With coef 0 a family whose selection cannot be read has no statistics; otherwise it is refused.
    """

    def __init__(self, loss: Loss, routers: Routers, coef: float, device: torch.device) -> None:
        """Starts recording. coef: 0 only collects the statistics."""
        self._loss = loss
        self._routers = routers
        self._coef = coef
        sizes = {"num_layers": routers.num_layers, "num_experts": routers.num_experts}
        self._counted = RouterStatistics(**sizes, device=device)
        self.statistics = RouterStatistics(**sizes, device=device)
        """Of the forwards for which the loss was called."""
        routers.records = True

    def close(self) -> None:
        """Stop recording."""
        self._routers.records = False

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Those of the loss."""
        return self._loss.denominators(batch)

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """As the loss does."""
        return self._loss.finalize(metrics)

    def count(self, output: Any, micro: Micro) -> dict[str, Tensor]:
        """Count the experts of one forward, before the loss of any of them is computed."""
        self._counted.add(self._routers.take_all(), micro.rows_of_token.flatten().float())
        return {}

    def sum_counts(self, reduce: Reduce) -> None:
        """End the counting. All ranks call it together."""
        self._counted.sum_over_ranks(reduce)

    def __call__(
        self, output: Any, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its metrics, with this forward's part of the auxiliary loss."""
        value, metrics = self._loss(output, micro, totals)
        layers = self._routers.take_all() if self._coef else self._routers.take()
        weights = micro.rows_of_token.flatten().float()
        self.statistics.add(layers, weights)
        if self._coef:
            value = value + self._coef * balance_loss(layers, weights, self._counted)
        return value, metrics


def balance_loss(
    layers: Sequence[RoutedLayer], weights: Tensor, statistics: RouterStatistics
) -> Tensor:
    """Return the part of the auxiliary loss of one forward, a scalar.

    The parts of all forwards of a mini-batch sum to its loss. weights (tokens,): rows that have the
    token. statistics: counts of the mini-batch, summed over all ranks.
    """
    parts = []
    for layer, scale in zip(layers, balance_scales(statistics), strict=True):
        parts.append(weights @ (layer.probabilities @ scale))
    return torch.stack(parts).sum()


def balance_scales(statistics: RouterStatistics) -> Tensor:
    """Return the derivative of the auxiliary loss by the probability of an expert for a token.

    (layers, E) float32. statistics: counts of the mini-batch, summed over all ranks.
    """
    num_layers, num_experts = statistics.counts.shape
    tokens = statistics.num_tokens.clamp(min=1)[:, None]
    return (num_experts * statistics.shares / tokens / num_layers).float()
