"""The routers of a Megatron model: experts of each token, replayed routes, and the auxiliary loss.

`ExpertRouter` replaces Megatron's router in every layer. `StageRouters` has all routers of one rank
and knows the micro-batch that runs. Each rank sees some layers and, under sequence parallelism, a
part of the tokens, so statistics are summed over all ranks of the pool. The auxiliary loss
(`objectives.balance`) cannot be added to the loss, which only the last stage computes: it is
attached to the weights of the experts, whose backward adds its gradient.

With recompute, a layer runs a second time in backward, when another micro-batch is current. Every
layer runs backward in the order of its forwards, so it takes what its first forward left in a
queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from spmdflow.objectives.balance import Reduce, RouterStatistics, balance_scales
from spmdflow.router import OWN_CHOICE, RoutedLayer
from spmdflow.workers.divided_experts import ExpertTraffic
from spmdflow.workers.micro_batch import MicroBatch


@dataclass(frozen=True)
class RoutedTokens:
    """What the routers of a rank must know about the tokens of one micro-batch."""

    weights: Tensor
    """(n,): the number of rows that have the token."""
    routes: Tensor | None
    """(n, layers of the model, k): the experts to use. None: the routers select them."""

    @classmethod
    def of(cls, micro: MicroBatch, *, part: int, num_parts: int) -> RoutedTokens:
        """Return those of a rank's part of the tokens, in Megatron's order.

        Megatron's order is that of (T, b). Under sequence parallelism T is divided into num_parts,
        otherwise there is one part. T must be a multiple of num_parts.
        """
        rows, length = micro.input_ids.shape
        own = slice(part * length // num_parts, (part + 1) * length // num_parts)
        weights = micro.rows_of_token.T[own].flatten().double()
        if micro.routes is None:
            return cls(weights, None)
        routes = micro.routes.unflatten(0, (rows, length)).transpose(0, 1)[own].flatten(0, 1)
        return cls(weights, routes)


class ExpertRouter(TopKRouter):
    """Selects the experts of each token, as the families of transformers with a table do.

    Logits and probabilities are float32, as there. Megatron's own forward computes the same, but
    its product needs TransformerEngine or a GPU, and it knows nothing of our micro-batches.
    """

    stage: StageRouters
    """Set by it, like the next one."""
    layer: int
    """Number of its layer in the model."""

    def reset_parameters(self) -> None:
        """Create the weight on Megatron's current device; its own router does so when it runs."""
        super().reset_parameters()
        self.weight.data = self.weight.data.to(torch.cuda.current_device())

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights of the experts and their mask, both (n, E): (T, b, H) -> n = T * b.

        The weights of experts that a token does not use are 0. padding_mask is ignored: padding is
        routed like other tokens, and counts nowhere.
        """
        hidden = input.flatten(0, -2)
        logits = nn.functional.linear(hidden.float(), self.weight.float())
        tokens = self.stage.tokens_of(self.layer)
        experts = logits.topk(self.topk, dim=-1).indices
        if tokens.routes is not None:
            given = tokens.routes[:, self.layer].long()
            experts = torch.where(given == OWN_CHOICE, experts, given)
        if self.config.moe_router_pre_softmax:
            chosen = logits.softmax(-1).gather(-1, experts)
        else:
            chosen = logits.gather(-1, experts).softmax(-1)
        routed = RoutedLayer(logits, experts, uses_sigmoid=False)
        chosen = self.stage.count(self.layer, routed, tokens, chosen)
        weights = torch.zeros_like(logits).scatter(-1, experts, chosen)
        mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
        return weights.to(input.dtype), mask


def count_exchanges(dispatcher: Any, traffic: ExpertTraffic) -> None:
    """Count what a rank sends to the experts of other ranks and back, in a dispatcher's layer.

    dispatcher: Megatron's, with all-to-alls over several ranks. A backward sends as much as its
    forward receives, and is counted with it.
    """
    dispatch = dispatcher.token_dispatch
    combine = dispatcher.token_combine
    rank = dispatcher.ep_group.rank()

    def add(rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        of_row = rows.itemsize * rows.shape[1:].numel()
        leaving = int(sum(sent)) - int(sent[rank])
        traffic.num_bytes += leaving * of_row
        if torch.is_grad_enabled() and rows.requires_grad:
            traffic.num_bytes += (int(sum(received)) - int(received[rank])) * of_row

    def counted_dispatch(rows: Tensor, weights: Tensor) -> Any:
        result = dispatch(rows, weights)
        for each in (rows, weights):
            add(each, dispatcher.input_splits, dispatcher.output_splits)
        return result

    def counted_combine(rows: Tensor, *more: Any, **named: Any) -> Any:
        add(rows, dispatcher.output_splits, dispatcher.input_splits)
        return combine(rows, *more, **named)

    dispatcher.token_dispatch = counted_dispatch
    dispatcher.token_combine = counted_combine


@dataclass
class _Pass:
    """The forwards, and perhaps backwards, of the micro-batches of one mini-batch."""

    statistics: RouterStatistics
    """Of the tokens of this pass."""
    scales: Tensor | None = None
    """(layers, E): derivative of the auxiliary loss by each probability. None: there is no
    auxiliary loss."""
    recomputes: bool = False
    """Every layer runs again in backward."""
    waiting: dict[int, deque[RoutedTokens]] = field(default_factory=dict)
    """By layer: micro-batches whose backward has not run, oldest first."""


class StageRouters:
    """The routers of all parts of the model on one rank."""

    def __init__(
        self,
        routers: Mapping[int, ExpertRouter],
        *,
        num_layers: int,
        device: torch.device,
        part: int,
        num_parts: int,
    ) -> None:
        """routers: by number of the layer in the model, which has num_layers.

        part, num_parts: which tokens this rank has (`RoutedTokens.of`).
        """
        self.traffic = ExpertTraffic()
        """Of the experts of all layers on this rank."""
        first = next(iter(routers.values()))
        self._sizes = {"num_layers": num_layers, "num_experts": first.num_experts}
        self._device = device
        self._part = {"part": part, "num_parts": num_parts}
        self._tokens: RoutedTokens | None = None
        self._pass: _Pass | None = None
        for layer, router in routers.items():
            router.stage = self
            router.layer = layer

    def begin(self, micro: MicroBatch) -> None:
        """Prepare the next forward of a part of the model."""
        self._tokens = RoutedTokens.of(micro, **self._part)

    def start_counting(self) -> None:
        """Begin a pass without backward, which counts the tokens of each expert."""
        self._pass = _Pass(RouterStatistics(**self._sizes, device=self._device))

    def start_training(
        self, coef: float, counted: RouterStatistics | None, *, recomputes: bool
    ) -> None:
        """Begin a pass with backward, which adds the gradient of coef times the auxiliary loss.

        counted: of the pass that counted, summed over all ranks. None: there is no auxiliary loss.
        """
        scales = None if counted is None else coef * balance_scales(counted)
        self._pass = _Pass(RouterStatistics(**self._sizes, device=self._device), scales, recomputes)

    def end(self, reduce: Reduce) -> RouterStatistics:
        """End the pass, and return its statistics, summed over all ranks of the pool.

        reduce: sums over them; they all call it together.
        """
        assert self._pass is not None
        statistics = self._pass.statistics
        statistics.sum_over_ranks(reduce)
        self._pass = None
        return statistics

    def tokens_of(self, layer: int) -> RoutedTokens:
        """Return the tokens of the forward that a layer runs now, for the first time or again."""
        assert self._tokens is not None
        if self._pass is None or not self._pass.recomputes:
            return self._tokens
        waiting = self._pass.waiting.setdefault(layer, deque())
        if torch.is_grad_enabled():  # again, in backward
            return waiting.popleft()
        waiting.append(self._tokens)
        return self._tokens

    def count(
        self, layer: int, routed: RoutedLayer, tokens: RoutedTokens, chosen: Tensor
    ) -> Tensor:
        """Add what a router did to the statistics, and the auxiliary loss to its backward.

        A layer that runs again is not counted again. chosen: the weights of the selected experts,
        which are returned.
        """
        current = self._pass
        if current is None:
            return chosen
        has_gradient = torch.is_grad_enabled()
        if not (current.recomputes and has_gradient):
            current.statistics.add_layer(layer, routed, tokens.weights)
        if current.scales is None or not has_gradient:
            return chosen
        weights = tokens.weights.float()
        loss = weights @ (routed.probabilities @ current.scales[layer])
        result: Tensor = _WithLoss.apply(chosen, loss)
        return result


class _WithLoss(torch.autograd.Function):
    """Returns its first argument; backward gives the second one, a loss, the gradient 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        """values, unchanged."""
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the gradient of values, and 1 for the loss."""
        return gradient, gradient.new_ones(())
