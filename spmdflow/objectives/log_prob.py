"""Log-probabilities and entropy of logits without a second (B, T, V) tensor in the forward.

log p(y) = z_y / tau - logsumexp(z / tau), in float32 whatever the logits' dtype (bfloat16
log-probs would bias the ratio). Work runs in chunks of positions; backward recomputes the
softmax of a chunk instead of keeping it, so autograd stores the logits themselves and (B, T).

Under tensor parallelism each rank has some columns of the vocabulary (`LogitShard`). Forward
all-reduces two or three numbers a position over the given group; backward needs nothing from
the other ranks, because they all derive the same loss from the same results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class LogitShard:
    """This rank's columns of the logits; all ranks of group hold those of the same positions."""

    logits: Tensor
    """(..., V/t): columns first, first + 1, ... of the vocabulary."""
    first: int
    vocab_size: int
    """Columns from here on are padding: they take no part in the softmax."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other columns; None: there are no others."""

    @property
    def width(self) -> int:
        """Columns held here that are no padding."""
        return min(max(self.vocab_size - self.first, 0), self.logits.shape[-1])


def log_probs_from_logits(
    logits: Tensor | LogitShard, ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature) at ids: (..., V), (...) int64 -> (...) float32."""
    assert temperature > 0, temperature
    flat, shard = _flatten(logits)
    result: Tensor = _LogProb.apply(flat, ids.reshape(-1), temperature, shard)  # type: ignore[no-untyped-call]
    return result.view(ids.shape)


def entropy_from_logits(logits: Tensor | LogitShard, temperature: float = 1.0) -> Tensor:
    """H = -sum_v p_v log p_v of softmax(logits / temperature): (..., V) -> (...) float32."""
    assert temperature > 0, temperature
    flat, shard = _flatten(logits)
    result: Tensor = _Entropy.apply(flat, temperature, shard)  # type: ignore[no-untyped-call]
    whole = logits if isinstance(logits, Tensor) else logits.logits
    return result.view(whole.shape[:-1])


class _LogProb(torch.autograd.Function):
    """d log p(y) / dz_v = (1[v = y] - p_v) / tau."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float, shard: _Columns
    ) -> Tensor:
        """(N,) log-probabilities of ids (N,), from logits (N, width) of this shard."""
        column = ids - shard.first
        here = (column >= 0) & (column < shard.width)
        column = torch.where(here, column, 0)
        picked = logits.gather(1, column[:, None])[:, 0].to(_widen(logits)) / temperature
        picked = torch.where(here, picked, 0.0)
        normaliser = torch.empty_like(picked)
        for part in _chunks(logits):
            normaliser[part] = _log_sum(_scale(logits[part], temperature, shard))
        if shard.group is not None:
            normaliser = _joint_log_sum(normaliser, shard.group)
            dist.all_reduce(picked, group=shard.group)
        ctx.save_for_backward(logits, column, here, normaliser)
        ctx.temperature, ctx.shard = temperature, shard
        return picked - normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient of the logits, chunk by chunk; ids, temperature and shard have none."""
        logits, column, here, normaliser = ctx.saved_tensors
        shard, grad = ctx.shard, grads[0] / ctx.temperature
        out = torch.zeros_like(logits)
        for part in _chunks(logits):
            probs = (_scale(logits[part], ctx.temperature, shard) - normaliser[part, None]).exp()
            dense = probs * -grad[part, None]  # (n, width)
            if shard.width:
                dense.scatter_add_(1, column[part, None], (grad * here)[part, None])
            out[part, : shard.width] = dense.to(logits.dtype)
        return out, None, None, None


class _Entropy(torch.autograd.Function):
    """dH / dz_v = -p_v (log p_v + H) / tau."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float, shard: _Columns) -> Tensor:
        """(N,) entropies in nats, over all shards of the vocabulary."""
        entropy = torch.empty(len(logits), dtype=_widen(logits), device=logits.device)
        normaliser = torch.empty_like(entropy)
        for part in _chunks(logits):
            scaled = _scale(logits[part], temperature, shard)
            normaliser[part] = _log_sum(scaled)
            probs = (scaled - normaliser[part, None]).exp()
            entropy[part] = torch.special.entr(probs).sum(-1)
        if shard.group is not None:
            local, normaliser = normaliser, _joint_log_sum(normaliser, shard.group)
            # H of a mixture of disjoint parts: sum_r P_r H_r - P_r log P_r
            share = (local - normaliser).exp()
            entropy = share * entropy + torch.special.entr(share)
            dist.all_reduce(entropy, group=shard.group)
        ctx.save_for_backward(logits, entropy, normaliser)
        ctx.temperature, ctx.shard = temperature, shard
        return entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the logits, chunk by chunk."""
        logits, entropy, normaliser = ctx.saved_tensors
        shard, grad = ctx.shard, grads[0] / ctx.temperature
        out = torch.zeros_like(logits)
        for part in _chunks(logits):
            log_probs = _scale(logits[part], ctx.temperature, shard) - normaliser[part, None]
            # a word of probability 0 has log-prob -inf and no weight
            slope = torch.where(
                log_probs.isneginf(), 0.0, log_probs.exp() * (log_probs + entropy[part, None])
            )
            out[part, : shard.width] = (-slope * grad[part, None]).to(logits.dtype)
        return out, None, None


@dataclass(frozen=True)
class _Columns:
    """What the maths needs to know of a shard: everything but the logits."""

    first: int
    width: int
    group: dist.ProcessGroup | None


def _flatten(logits: Tensor | LogitShard) -> tuple[Tensor, _Columns]:
    """Logits as (N, V/t), and which columns they are."""
    if isinstance(logits, Tensor):
        return logits.reshape(-1, logits.shape[-1]), _Columns(0, logits.shape[-1], None)
    columns = _Columns(logits.first, logits.width, logits.group)
    return logits.logits.reshape(-1, logits.logits.shape[-1]), columns


def _widen(logits: Tensor) -> torch.dtype:
    """float32 at least; float64 stays float64."""
    return torch.promote_types(logits.dtype, torch.float32)


def _scale(logits: Tensor, temperature: float, shard: _Columns) -> Tensor:
    return logits[:, : shard.width].to(_widen(logits)) / temperature


def _log_sum(scaled: Tensor) -> Tensor:
    """logsumexp of each row; -inf if this rank has no column at all."""
    if scaled.shape[-1] == 0:
        return scaled.new_full(scaled.shape[:-1], -torch.inf)
    return scaled.logsumexp(-1)


def _joint_log_sum(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """log sum exp of the ranks' values, the same bits on all of them."""
    largest = local.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = (local - largest).exp()
    dist.all_reduce(total, group=group)
    return largest + total.log()


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows with about 64 MB of float32 each."""
    size = max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    return (slice(start, start + size) for start in range(0, len(logits), size))
