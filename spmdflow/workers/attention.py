"""Causal attention over rows that lie end to end, without padding: a row attends to itself alone.

One mask over all tokens would cost the square of the total length; here the cost is the sum of the
squared row lengths. Where PyTorch has kernels for rows of any length (half precision on CUDA), one
of them takes all rows; elsewhere neighbours of equal length go through the dense kernels together.

Rows may share a prompt (samples of GRPO, pairs of DPO). It is then packed and computed once, as a
row of its own; the rows that share it hold only what follows, and also attend to its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from spmdflow.parallel.derivative import differentiable_once


@dataclass(frozen=True)
class PackedRows:
    """Where each row lies among the packed tokens."""

    lengths: tuple[int, ...]
    """Tokens of each row, at least 1."""
    offsets: Tensor
    """(b + 1,) int32: where each row begins, and the end of the last."""
    seen: SeenKeys | None = None
    """Where rows share prompts; None: each sees its own tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PackedRows:
        """Rows of these lengths, in host memory."""
        return cls(tuple(lengths), _offsets(lengths))

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedRows:
        """The same rows, each tensor passed through `move`."""
        seen = self.seen
        if seen is not None:
            seen = SeenKeys(seen.lengths, move(seen.offsets), move(seen.places))
        return PackedRows(self.lengths, move(self.offsets), seen)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(number of rows, tokens per row, keys per row) of each run of rows of equal sizes."""
        keys = self.lengths if self.seen is None else self.seen.lengths
        pairs = groupby(zip(self.lengths, keys, strict=True))
        return [(len(list(run)), *sizes) for sizes, run in pairs]


@dataclass(frozen=True)
class SeenKeys:
    """The keys that each row sees, in order; its own tokens are the last of them."""

    lengths: tuple[int, ...]
    offsets: Tensor
    """(b + 1,) int32: where the keys of each row begin, and the end of the last."""
    places: Tensor
    """(sum of lengths,) int64: index of each key among the packed tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int], places: Tensor) -> SeenKeys:
        """The keys at these places, row by row, in host memory."""
        return cls(tuple(lengths), _offsets(lengths), places)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """query (N, heads, d), key and value (N, kv heads, d) of all rows -> (N, heads, d).

    window: a token attends to itself and the window - 1 tokens before it; None: no limit.
    """
    seen = rows.seen
    if seen is not None:
        key, value = (x.index_select(0, seen.places) for x in (key, value))
    if _has_varlen(query):
        ends = rows.offsets
        most = max(rows.lengths)
        key_ends, most_keys = (ends, most) if seen is None else (seen.offsets, max(seen.lengths))
        left = -1 if window is None else window - 1
        found = varlen_attn(
            query, key, value, ends, key_ends, most, most_keys,
            scale=scale, window_size=(left, 0), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        assert isinstance(found, Tensor)
        return found
    runs = rows.runs
    mixed: list[Tensor] = []
    queries = query.split([count * length for count, length, _ in runs])
    keys, values = (x.split([count * length for count, _, length in runs]) for x in (key, value))
    for count, length, num_keys in runs:
        q = queries[len(mixed)].unflatten(0, (count, length)).transpose(1, 2)  # (rows, heads, T, d)
        k, v = (
            x[len(mixed)].unflatten(0, (count, num_keys)).transpose(1, 2) for x in (keys, values)
        )
        run = dense_attention(q, k, v, scale=scale, window=window)
        mixed.append(run.transpose(1, 2).flatten(0, 1))
    if len(mixed) == 1:
        return mixed[0]
    return torch.cat(mixed)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """query (b, heads, T, d), key and value (b, kv heads, S, d) -> (b, heads, T, d), causal.

    The queries are those of the last T of S positions. A CPU's kernel also computes what a mask
    leaves out: there, blocks of queries take the keys up to their own last.
    """
    queries = query.shape[2]
    end = key.shape[2]
    is_plain = queries == end and (window is None or queries <= window)
    num_blocks = min(4, queries // 32) if query.is_cpu and not is_plain else 1
    mixed: list[Tensor] = []
    end -= queries
    for block in query.split(-(-queries // max(1, num_blocks)), 2):
        end += block.shape[2]
        if is_plain:
            mask = None
        else:
            mask = _band(block.shape[2], end, window, query.device)
        mixed.append(_masked_attention(block, key[:, :, :end], value[:, :, :end], mask, scale))
    if len(mixed) == 1:
        return mixed[0]
    return torch.cat(mixed, 2)


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    if query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # of CUDA's kernels only flash takes grouped heads: half precision and no mask
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(T, S) bool: True for the last `window` positions up to each query's."""
    places = torch.arange(keys, device=device)
    distance = places[keys - queries :, None] - places
    return (distance >= 0) & (distance < (window or keys))


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al. 2021) of (b, heads, T, d) each, by cos and sin (b, T, d).

    sin is negated in its first half: the result is x * cos + (x with its halves swapped) * sin.
    """
    cos = cos[:, None]
    sin = sin[:, None]
    turned: list[Tensor] = [_Rotation.apply(x, cos, sin) for x in (query, key)]  # type: ignore[no-untyped-call]
    return turned[0], turned[1]


class _Rotation(torch.autograd.Function):
    """Reads x twice, saves none of it for backward; dx = g * cos + (g * sin, halves swapped)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `rotate`."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, _halves(sin))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x alone; see the class."""
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, _halves(sin).flip(-2)), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    found = x * cos
    _halves(found).addcmul_(_halves(x).flip(-2), sin)
    return found


def _halves(x: Tensor) -> Tensor:
    """(..., d) -> (..., 2, d/2), a view."""
    return x.unflatten(-1, (2, -1))


def _has_varlen(query: Tensor) -> bool:
    """Whether PyTorch's flash kernels for rows of any length take this."""
    return (
        query.is_cuda
        and "enable_gqa" in signature(varlen_attn).parameters  # from torch 2.12
        and query.dtype in (torch.float16, torch.bfloat16)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
