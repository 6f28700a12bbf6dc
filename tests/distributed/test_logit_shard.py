"""Log-probs and entropy of vocabulary shards: padding, ranks, and columns that no rank needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.objectives.log_prob import LogitShard, entropy_from_logits, log_probs_from_logits

VOCABULARY, WIDTH, RANKS, TAU = 7, 4, 3, 0.7  # the last rank has padding alone


def sample() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(2, 6, VOCABULARY, generator=generator)
    logits[0, 0, 3] = -torch.inf
    return logits, torch.randint(0, VOCABULARY, (2, 6), generator=generator)


def both(logits: Tensor | LogitShard, ids: Tensor) -> tuple[Tensor, Tensor]:
    return log_probs_from_logits(logits, ids, TAU), entropy_from_logits(logits, TAU)


def expected() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and the gradient of a mixture of them, in float64."""
    logits, ids = sample()
    logits = logits.double().requires_grad_()
    log_probs, entropy = both(logits, ids)
    (2 * log_probs.sum() + entropy.square().sum()).backward()
    assert logits.grad is not None
    return log_probs.detach(), entropy.detach(), logits.grad


def test_padded_columns_take_no_part_and_get_no_gradient() -> None:
    logits, ids = sample()
    padded = torch.nn.functional.pad(
        logits, (0, RANKS * WIDTH - VOCABULARY), value=50.0
    ).requires_grad_()

    log_probs, entropy = both(LogitShard(padded, 0, VOCABULARY), ids)
    (2 * log_probs.sum() + entropy.square().sum()).backward()

    wanted = expected()
    torch.testing.assert_close(log_probs, wanted[0].float(), atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy, wanted[1].float(), atol=2e-6, rtol=0)
    assert padded.grad is not None and bool((padded.grad[..., VOCABULARY:] == 0).all())
    torch.testing.assert_close(padded.grad[..., :VOCABULARY], wanted[2].float(), atol=1e-5, rtol=0)


def on_each_rank() -> list[list[list[float]]]:
    rank = dist.get_rank()
    logits, ids = sample()
    padded = torch.nn.functional.pad(logits, (0, RANKS * WIDTH - VOCABULARY), value=50.0)
    mine = padded[..., rank * WIDTH : (rank + 1) * WIDTH].clone().requires_grad_()
    shard = LogitShard(mine, rank * WIDTH, VOCABULARY, dist.group.WORLD)
    log_probs, entropy = both(shard, ids)
    (2 * log_probs.sum() + entropy.square().sum()).backward()
    assert mine.grad is not None
    return [log_probs.tolist(), entropy.tolist(), mine.grad.tolist()]


@pytest.fixture(scope="module")
def shards(spawn_ranks: Callable[..., Any]) -> list[list[Tensor]]:
    found = spawn_ranks(on_each_rank, RANKS, seconds=60)
    return [[torch.tensor(values) for values in rank] for rank in found]


def test_shards_of_three_ranks_give_what_whole_logits_give(shards: list[list[Tensor]]) -> None:
    wanted = expected()

    for log_probs, entropy, _ in shards:
        torch.testing.assert_close(log_probs, wanted[0].float(), atol=2e-6, rtol=0)
        torch.testing.assert_close(entropy, wanted[1].float(), atol=2e-6, rtol=0)
    gradient = torch.cat([x for *_, x in shards], -1)[..., :VOCABULARY]
    torch.testing.assert_close(gradient, wanted[2].float(), atol=1e-5, rtol=0)


def test_ranks_of_a_shard_get_the_same_bits(shards: list[list[Tensor]]) -> None:
    for log_probs, entropy, _ in shards[1:]:
        assert torch.equal(log_probs, shards[0][0]) and torch.equal(entropy, shards[0][1])
