"""Routers of a module: what they select, what they repeat, and how even that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from spmdflow.errors import ConfigError
from spmdflow.objectives.balance import BalancedLoss, RouterStatistics, balance_loss
from spmdflow.router import (
    OWN_CHOICE,
    RoutedLayer,
    Routers,
    as_column,
    from_column,
    own_column,
    route_dtype,
)

CPU = torch.device("cpu")
NUM_EXPERTS = 6


class Router(nn.Module):
    """Two of six experts by a softmax, as most families have it."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, 8))

    def forward(self, hidden: Tensor) -> Any:
        logits = hidden.flatten(0, -2) @ self.weight.T
        weights, experts = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), experts


class SparseMixer(Router):
    """A selection without topk."""

    def forward(self, hidden: Tensor) -> Any:
        logits = hidden.flatten(0, -2) @ self.weight.T
        return logits, logits.max(-1, keepdim=True).values, logits.argmax(-1, keepdim=True)


class Model(nn.Module):
    """Two routers, found as transformers' recorders find them."""

    def __init__(self, kind: type[Router] = Router) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(), kind()])
        self.config = SimpleNamespace()
        self._can_record_outputs = {"router_logits": kind}

    @property
    def base_model(self) -> Model:
        return self

    def forward(self, hidden: Tensor) -> list[Any]:
        return [layer(hidden) for layer in self.layers]


def test_given_routes_are_used_with_the_router_s_own_weights_and_gradients() -> None:
    torch.manual_seed(0)
    model = Model()
    hidden = torch.randn(1, 4, 8)
    routers = Routers.of(model)
    assert routers is not None and (routers.num_layers, routers.num_chosen) == (2, 2)
    own = [experts for _, _, experts in model(hidden)]
    routes = routers.own_routes(4)
    routes[1:, 0] = torch.tensor([5, 3], dtype=torch.int16)

    routers.begin(routes)
    (logits, weights, experts), (_, _, others) = model(hidden)

    assert experts[1:].tolist() == [[5, 3]] * 3
    assert torch.equal(experts[0], own[0][0]) and torch.equal(others, own[1])
    expected = logits[1:].softmax(-1)[:, [5, 3]]
    torch.testing.assert_close(weights[1:], expected / expected.sum(-1, keepdim=True))
    weights[1:, 0].sum().backward()
    assert float(model.layers[0].weight.grad.abs().sum()) > 0


def test_a_forward_is_recorded_only_if_asked_and_a_second_run_of_layers_changes_nothing() -> None:
    model = Model()
    routers = Routers.of(model)
    assert routers is not None
    routers.begin()
    model(torch.randn(3, 8))
    assert routers.take() == []
    routers.records = True

    routers.begin()
    first = model(torch.randn(3, 8))
    model(torch.randn(3, 8))  # as recompute does in backward

    assert all(
        torch.equal(layer.logits, logits)
        for layer, (logits, _, _) in zip(routers.take(), first, strict=True)
    )


def test_a_selection_without_topk_has_no_statistics_and_is_refused_where_they_are_needed() -> None:
    model = Model(SparseMixer)
    routers = Routers.of(model)
    assert routers is not None
    micro: Any = SimpleNamespace(rows_of_token=torch.ones(1, 3))

    def run(coef: float) -> dict[str, Any]:
        class Zero:
            def __call__(self, *_: Any) -> Any:
                return torch.zeros(()), {}

        loss = BalancedLoss(Zero(), routers, coef, CPU)  # type: ignore[arg-type]
        routers.begin()
        model(torch.randn(3, 8))
        loss(None, micro, {})
        return loss.statistics.metrics()

    assert run(0.0) == {}
    with pytest.raises(ConfigError, match="do not select their experts with torch.topk"):
        run(0.1)


def layers_of(seed: int, *, uses_sigmoid: bool = False) -> list[RoutedLayer]:
    """Two layers, 12 tokens, 2 of 6 experts each."""
    torch.manual_seed(seed)
    layers = []
    for _ in range(2):
        logits = torch.randn(12, NUM_EXPERTS, requires_grad=True)
        layers.append(RoutedLayer(logits, logits.topk(2).indices, uses_sigmoid))
    return layers


def test_balance_is_transformers_loss_of_each_layer_whatever_the_micro_batches() -> None:
    layers = layers_of(0)
    weights = torch.ones(12)
    weights[10:] = 0  # padding
    statistics = RouterStatistics(num_layers=2, num_experts=6, device=CPU)
    statistics.add(layers, weights)
    mask = weights.view(1, 12)
    expected = torch.stack(
        [load_balancing_loss_func((layer.logits,), 6, 2, mask) for layer in layers]
    ).mean()

    parts = []
    for tokens in (slice(0, 5), slice(5, 12)):
        part = [RoutedLayer(layer.logits[tokens], layer.experts[tokens], False) for layer in layers]
        parts.append(balance_loss(part, weights[tokens], statistics))

    torch.testing.assert_close(sum(parts), expected)
    assert statistics.metrics()["router_balance"] == pytest.approx(float(expected), rel=1e-6)
    own = torch.autograd.grad(sum(parts), layers[0].logits, retain_graph=True)[0]
    theirs = torch.autograd.grad(expected, layers[0].logits)[0]
    torch.testing.assert_close(own, theirs)


def test_scores_of_sigmoids_are_divided_by_their_sum() -> None:
    (layer, _) = layers_of(1, uses_sigmoid=True)

    scores = layer.logits.sigmoid()

    torch.testing.assert_close(layer.probabilities, scores / scores.sum(-1, keepdim=True))


def test_a_shared_token_counts_once_for_each_of_its_rows() -> None:
    layers = layers_of(2)
    twice = torch.ones(12)
    twice[:3] = 2
    once = RouterStatistics(num_layers=2, num_experts=6, device=CPU)
    shared = RouterStatistics(num_layers=2, num_experts=6, device=CPU)

    once.add(layers, torch.ones(12))
    once.add([RoutedLayer(x.logits[:3], x.experts[:3], False) for x in layers], torch.ones(3))
    shared.add(layers, twice)

    torch.testing.assert_close(once.counts, shared.counts)
    torch.testing.assert_close(once.probabilities, shared.probabilities)
    torch.testing.assert_close(once.num_tokens, shared.num_tokens)


@pytest.mark.parametrize("num_experts", [8, 254, 255, 1024])
def test_columns_keep_every_expert_and_own_choices(num_experts: int) -> None:
    routes = torch.tensor([[0, num_experts - 1], [OWN_CHOICE, OWN_CHOICE]], dtype=torch.int16)

    column = as_column(routes, num_experts)

    assert column.dtype == route_dtype(num_experts)
    assert column.element_size() == (1 if num_experts < 255 else 2)
    assert torch.equal(from_column(column), routes)
    assert torch.equal(column[1], own_column(column.dtype, (2,)))
