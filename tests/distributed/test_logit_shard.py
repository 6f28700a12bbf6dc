"""Log-probs and entropy of a head in shards: padding, ranks, and words that no rank needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.objectives import log_prob
from spmdflow.objectives.log_prob import CausalOutput

# the last rank has padding alone
VOCABULARY = 7
WIDTH = 4
RANKS = 3
TAU = 0.7
TOKENS = 12
HIDDEN = 5


def sample() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head padded with large rows, and the tokens that came."""
    generator = torch.Generator().manual_seed(0)
    hidden = 2 * torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.full((RANKS * WIDTH, HIDDEN), 50.0)
    weight[:VOCABULARY] = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def run(hidden: Tensor, weight: Tensor, targets: Tensor, **shard: Any) -> list[Tensor]:
    """Log-probs, entropy, and the gradients of a mixture of them, in blocks of 2 words."""
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    output = CausalOutput(*leaves, targets, vocab_size=VOCABULARY, **shard)
    with pytest.MonkeyPatch.context() as patch:  # later tests in the process have usual blocks
        patch.setattr(log_prob, "CHUNK_ELEMENTS", log_prob.HOST_PARTS * 2 * TOKENS)
        log_probs, entropy = output.log_probs_and_entropy(TAU)
        (2 * log_probs.sum() + entropy.square().sum()).backward()  # type: ignore[no-untyped-call]
    grads = [x.grad for x in leaves if x.grad is not None]
    return [log_probs.detach(), entropy.detach(), *grads]


def expected() -> list[Tensor]:
    """The same by log_softmax in float64; the padding's gradient is 0."""
    hidden, weight, targets = sample()
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    full = ((hidden @ weight.T)[:, :VOCABULARY] / TAU).log_softmax(-1)
    log_probs = full[torch.arange(TOKENS), targets]
    entropy = -(full.exp() * full).sum(-1)
    (2 * log_probs.sum() + entropy.square().sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [x.detach().float() for x in (log_probs, entropy, hidden.grad, weight.grad)]


def test_padded_words_take_no_part_and_get_no_gradient() -> None:
    hidden, weight, targets = sample()

    found = run(hidden, weight, targets)

    for mine, wanted in zip(found, expected(), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
    assert bool((found[-1][VOCABULARY:] == 0).all())


def on_each_rank() -> list[Any]:
    rank = dist.get_rank()
    hidden, weight, targets = sample()
    mine = weight[rank * WIDTH : (rank + 1) * WIDTH]
    found = run(hidden, mine, targets, first=rank * WIDTH, group=dist.group.WORLD)
    return [x.tolist() for x in found]


@pytest.fixture(scope="module")
def shards(spawn_ranks: Callable[..., Any]) -> list[list[Tensor]]:
    found = spawn_ranks(on_each_rank, RANKS)
    return [[torch.tensor(values) for values in rank] for rank in found]


def test_shards_of_three_ranks_give_what_a_whole_head_gives(shards: list[list[Tensor]]) -> None:
    log_probs, entropy, to_hidden, to_weight = expected()

    for found in shards:
        torch.testing.assert_close(found[0], log_probs, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(found[1], entropy, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(found[2], to_hidden, atol=1e-5, rtol=1e-5)
    whole = torch.cat([found[3] for found in shards])
    torch.testing.assert_close(whole, to_weight, atol=1e-5, rtol=1e-5)


def test_ranks_of_a_head_get_the_same_bits(shards: list[list[Tensor]]) -> None:
    for found in shards[1:]:
        assert all(torch.equal(found[part], shards[0][part]) for part in range(3))
