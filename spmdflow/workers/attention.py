"""Causal attention over rows that lie end to end, without padding: a row attends to itself alone.

A mask over all tokens would cost the square of their sum; here the cost is the sum of the rows'
squares. Where PyTorch has kernels for rows of any length (half precision on CUDA), one of them
takes all rows; elsewhere neighbours of equal length go through the dense kernels together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn


@dataclass(frozen=True)
class PackedRows:
    """Where rows lie that follow one another."""

    lengths: tuple[int, ...]
    """Tokens of each row, at least 1."""
    offsets: Tensor
    """(b + 1,) int32: where each row begins, and the end of the last."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PackedRows:
        """Rows of these lengths, in host memory."""
        return cls(tuple(lengths), functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int())

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(number of rows, tokens of each) of neighbours that are equally long."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]


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

    window: a token attends to the last so many tokens up to itself; None: to all before it.
    """
    if _has_varlen(query):
        ends, most = rows.offsets, max(rows.lengths)
        left = -1 if window is None else window - 1
        found = varlen_attn(
            query, key, value, ends, ends, most, most,
            scale=scale, window_size=(left, 0), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        assert isinstance(found, Tensor)
        return found
    runs = rows.runs
    sizes = [count * length for count, length in runs]
    mixed = []
    for *parts, run in zip(*(x.split(sizes) for x in (query, key, value)), runs, strict=True):
        q, k, v = (x.unflatten(0, run).transpose(1, 2) for x in parts)  # (rows, heads, T, d)
        run_mixed = dense_attention(q, k, v, scale=scale, window=window)
        mixed.append(run_mixed.transpose(1, 2).flatten(0, 1))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """query (b, heads, T, d), key and value (b, kv heads, T, d) -> (b, heads, T, d), causal."""
    mask = _band(query.shape[2], window, query.device)
    if query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # of CUDA's kernels only flash takes grouped heads: half precision and no mask
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(T, T) bool: the last `window` positions up to each; None if that is all of them."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def _has_varlen(query: Tensor) -> bool:
    """Whether PyTorch's flash kernels for rows of any length take this."""
    return (
        query.is_cuda
        and "enable_gqa" in signature(varlen_attn).parameters  # from torch 2.12
        and query.dtype in (torch.float16, torch.bfloat16)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
