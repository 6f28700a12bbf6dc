"""Log-probabilities and entropy of logits without a second (B, T, V) tensor in the forward.

log p(y) = z_y / tau - logsumexp(z / tau), in float32 whatever the logits' dtype (bfloat16
log-probs would bias the ratio). Work runs in chunks of positions; backward recomputes the
softmax of a chunk instead of keeping it, so autograd stores the logits themselves and (B, T).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24


def log_probs_from_logits(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at ids: (..., V), (...) int64 -> (...) float32."""
    assert temperature > 0, temperature
    flat = logits.reshape(-1, logits.shape[-1])  # (N, V)
    result: Tensor = _LogProb.apply(flat, ids.reshape(-1), temperature)  # type: ignore[no-untyped-call]
    return result.view(ids.shape)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """H = -sum_v p_v log p_v of softmax(logits / temperature): (..., V) -> (...) float32."""
    assert temperature > 0, temperature
    flat = logits.reshape(-1, logits.shape[-1])  # (N, V)
    result: Tensor = _Entropy.apply(flat, temperature)  # type: ignore[no-untyped-call]
    return result.view(logits.shape[:-1])


class _LogProb(torch.autograd.Function):
    """d log p(y) / dz_v = (1[v = y] - p_v) / tau."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        picked = logits.gather(1, ids[:, None])[:, 0].to(_wide(logits)) / temperature
        normaliser = torch.empty_like(picked)
        for part in _chunks(logits):
            normaliser[part] = _scaled(logits[part], temperature).logsumexp(-1)
        ctx.save_for_backward(logits, ids, normaliser)
        ctx.temperature = temperature
        return picked - normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, normaliser = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        out = torch.empty_like(logits)
        for part in _chunks(logits):
            probs = (_scaled(logits[part], ctx.temperature) - normaliser[part, None]).exp()
            dense = probs * -grad[part, None]
            dense.scatter_add_(1, ids[part, None], grad[part, None])
            out[part] = dense.to(logits.dtype)
        return out, None, None


class _Entropy(torch.autograd.Function):
    """dH / dz_v = -p_v (log p_v + H) / tau."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        entropy = torch.empty(len(logits), dtype=_wide(logits), device=logits.device)
        for part in _chunks(logits):
            log_probs = _scaled(logits[part], temperature).log_softmax(-1)
            entropy[part] = torch.special.entr(log_probs.exp()).sum(-1)
        ctx.save_for_backward(logits, entropy)
        ctx.temperature = temperature
        return entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, entropy = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        out = torch.empty_like(logits)
        for part in _chunks(logits):
            log_probs = _scaled(logits[part], ctx.temperature).log_softmax(-1)
            # a word of probability 0 has log-prob -inf and no weight
            slope = torch.where(
                log_probs.isneginf(), 0.0, log_probs.exp() * (log_probs + entropy[part, None])
            )
            out[part] = (-slope * grad[part, None]).to(logits.dtype)
        return out, None


def _wide(logits: Tensor) -> torch.dtype:
    """float32 at least; float64 stays float64."""
    return torch.promote_types(logits.dtype, torch.float32)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(_wide(logits)) / temperature


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows with about 64 MB of float32 each."""
    size = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    return (slice(start, start + size) for start in range(0, len(logits), size))
