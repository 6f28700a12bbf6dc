"""The head in blocks: values and gradients of plain log_softmax, without its memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmdflow.objectives import log_prob
from spmdflow.objectives.log_prob import CausalOutput
from tests.outputs import entropy_of, log_probs_of

TOKENS = 15
HIDDEN = 6
WORDS = 23


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four words, the last one short."""
    monkeypatch.setattr(log_prob, "CHUNK_ELEMENTS", log_prob.HOST_PARTS * 4 * TOKENS)


def sample(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and the tokens that came."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(WORDS, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy by the definition."""
    full = (logits / temperature).log_softmax(-1)
    return full[torch.arange(len(targets)), targets], -(full.exp() * full).sum(-1)


def gradients(terms: tuple[Tensor, Tensor], *of: Tensor) -> tuple[Tensor, ...]:
    """Of a mixture that weighs every token differently."""
    weight = torch.linspace(-1, 2, TOKENS, dtype=terms[0].dtype)
    return torch.autograd.grad((terms[0] * weight + terms[1] * weight.square()).sum(), of)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_head_gives_the_log_probs_entropy_and_gradients_of_log_softmax(
    blocks: None, temperature: float
) -> None:
    hidden, weight, targets = sample()

    ours = CausalOutput(hidden, weight, targets).log_probs_and_entropy(temperature)
    reference = plain(hidden @ weight.T, targets, temperature)

    close = {"rtol": 1e-5, "atol": 2e-6}  # float32 sums in another order
    for found, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(found, expected, **close)
    assert torch.equal(CausalOutput(hidden, weight, targets).log_probs(temperature), ours[0])
    pairs = zip(gradients(ours, hidden, weight), gradients(reference, hidden, weight), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, **close)


def test_gradients_equal_finite_differences_in_float64(blocks: None) -> None:
    hidden, weight, targets = sample(torch.float64)

    def both(x: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return CausalOutput(x, head, targets).log_probs_and_entropy(0.7)

    assert torch.autograd.gradcheck(both, (hidden, weight))
    logits = (hidden @ weight.T).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: CausalOutput(x, None, targets).log_probs_and_entropy(0.7), (logits,)
    )


def test_head_of_no_tokens_gives_none_and_zero_gradients() -> None:
    hidden, weight, _ = sample()

    log_probs = CausalOutput(hidden[:0], weight, torch.zeros(0, dtype=torch.int64)).log_probs()
    log_probs.sum().backward()

    assert log_probs.shape == (0,)
    assert weight.grad is not None and not weight.grad.any()


def test_frozen_head_gets_no_gradient_and_its_hidden_states_get_theirs(blocks: None) -> None:
    hidden, weight, targets = sample()

    CausalOutput(hidden, weight.detach(), targets).log_probs().sum().backward()

    (expected,) = torch.autograd.grad(plain(hidden @ weight.T, targets, 1.0)[0].sum(), hidden)
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=2e-6)


def test_gradient_of_the_heads_gradient_is_refused(blocks: None) -> None:
    hidden, weight, targets = sample()
    log_probs = CausalOutput(hidden, weight, targets).log_probs()
    (slope,) = torch.autograd.grad(log_probs.sum(), hidden, create_graph=True)

    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.square().sum().backward()


def test_padded_words_get_a_gradient_of_zero_whatever_their_memory_held(blocks: None) -> None:
    hidden, weight, targets = sample()
    padded = torch.cat([weight.detach(), torch.randn(5, HIDDEN)]).requires_grad_()
    (expected,) = torch.autograd.grad(
        CausalOutput(hidden, weight, targets).log_probs().sum(), weight
    )
    torch.use_deterministic_algorithms(True)  # fills memory that is only allocated with nan

    try:
        output = CausalOutput(hidden, padded, targets, vocab_size=WORDS)
        (found,) = torch.autograd.grad(output.log_probs().sum(), padded)
    finally:
        torch.use_deterministic_algorithms(False)

    assert torch.equal(found[:WORDS], expected)
    assert torch.equal(found[WORDS:], torch.zeros(5, HIDDEN))


def test_bfloat16_head_sums_in_float32(blocks: None) -> None:
    hidden, weight, targets = sample(torch.bfloat16)

    log_probs = CausalOutput(hidden, weight, targets).log_probs()
    log_probs.sum().backward()

    # the logits are rounded, as by a matrix product in bfloat16; what follows is not
    rounded = (hidden @ weight.T).detach().float()
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, plain(rounded, targets, 1.0)[0], rtol=1e-5, atol=2e-6)
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_capped_logits_are_read_as_they_are(blocks: None) -> None:
    logits = torch.randn(3, 5, 11, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 11, (3, 5))

    ours = (log_probs_of(logits, ids, 0.7), entropy_of(logits, 0.7))
    reference = [x.view(3, 5) for x in plain(logits.flatten(0, 1), ids.flatten(), 0.7)]

    for found, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(found, expected)
        slopes = [
            torch.autograd.grad(x.square().sum(), logits, retain_graph=True)[0]
            for x in (found, expected)
        ]
        torch.testing.assert_close(*slopes)


def test_words_of_probability_zero_have_no_entropy_and_no_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)

    entropy = entropy_of(logits)
    entropy.sum().backward()

    assert entropy.tolist() == pytest.approx([math.log(2)])
    assert logits.grad is not None and logits.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_backward_keeps_hidden_states_the_weight_and_the_last_blocks_of_logits(
    blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_prob, "HOST_PARTS", 2)
    monkeypatch.setattr(log_prob, "CHUNK_ELEMENTS", 2 * 4 * TOKENS)
    hidden, weight, targets = sample()
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        CausalOutput(hidden, weight, targets).log_probs(0.7)

    last = [TOKENS * 4, TOKENS * (WORDS % 4)]
    sizes = [TOKENS * HIDDEN, WORDS * HIDDEN, *[TOKENS] * 3, *last]
    assert sorted(x.numel() for x in saved) == sorted(sizes)


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that live at once, of those made inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


Terms = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def peak_of(terms: Terms, tokens: int, words: int, hidden: int) -> int:
    """Of log-probs with entropy and their backward, float32."""
    leaves = [torch.randn(n, hidden).requires_grad_() for n in (tokens, words)]
    with PeakBytes() as seen:
        log_probs, entropy = terms(*leaves, torch.arange(tokens) % words)
        (log_probs.sum() + entropy.sum()).backward()
    return seen.peak


def by_blocks(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return CausalOutput(hidden, weight, targets).log_probs_and_entropy(0.9)


def test_peak_is_at_most_an_eighth_of_the_logits_and_their_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_prob, "CHUNK_ELEMENTS", 1 << 14)

    logits = 4 * 512 * 2048
    assert peak_of(by_blocks, 512, 2048, hidden=16) <= 2 * logits / 8
    assert peak_of(lambda h, w, y: plain(h @ w.T, y, 0.9), 512, 2048, hidden=16) >= 2 * logits


@pytest.mark.slow
def test_peak_of_8192_tokens_and_151936_words_is_at_most_an_eighth_of_what_it_was() -> None:
    # the logits in float32 and their gradient: 9.96 GB; measured 0.46 GB
    assert peak_of(by_blocks, 8192, 151_936, hidden=64) <= 2 * 4 * 8192 * 151_936 / 8
