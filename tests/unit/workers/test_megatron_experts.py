"""Tokens of a micro-batch as Megatron's routers see them, and the names of grouped experts."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")


def test_tokens_are_in_the_order_of_positions_and_divided_over_the_sequence() -> None:
    from spmdflow.workers.megatron_experts import RoutedTokens

    weights = torch.tensor([[1, 1, 1, 0], [2, 1, 0, 0]])  # two rows of four positions
    routes = torch.arange(2 * 4 * 3 * 2).view(-1, 3, 2)  # three layers, two experts for a token
    micro = SimpleNamespace(input_ids=torch.zeros(2, 4), rows_of_token=weights, routes=routes)

    whole = RoutedTokens.of(micro, part=0, num_parts=1)
    parts = [RoutedTokens.of(micro, part=part, num_parts=2) for part in range(2)]

    assert whole.weights.tolist() == [1, 2, 1, 1, 1, 0, 0, 0]  # position by position
    by_row = routes.view(2, 4, 3, 2)
    assert torch.equal(whole.routes[3], by_row[1, 1])
    assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
    assert torch.equal(torch.cat([part.routes for part in parts]), whole.routes)
    assert len(parts[0].weights) == 4


def test_grouped_experts_of_transformer_engine_have_the_names_of_local_layers() -> None:
    from spmdflow.workers.megatron_model import local_name

    layer = "decoder.layers.7.mlp.experts"

    name = local_name(f"module.module.{layer}.linear_fc2.weight13")

    assert name == f"{layer}.local_experts.13.linear_fc2.weight"
    assert local_name(f"{layer}.local_experts.1.linear_fc1.weight").endswith("linear_fc1.weight")
    assert local_name("decoder.layers.0.mlp.router.weight") == "decoder.layers.0.mlp.router.weight"
