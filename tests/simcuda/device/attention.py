"""The flash kernel for rows of any length, with what CUDA's refuses (torch's flash_api.cpp).

It computes row by row in float32 on the host. A causal row's last query sees its last key.
"""

from __future__ import annotations

from collections.abc import Iterator

import surface
import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def install(library: torch.library.Library) -> None:
    """Give CUDA the two operators, and say that it has them."""
    library.impl("_flash_attention_forward", _forward, "CUDA")
    library.impl("_flash_attention_backward", _backward, "CUDA")
    torch._C._is_flash_attention_available = lambda: True


def _check(query: Tensor, key: Tensor, value: Tensor, offsets: tuple[Tensor, Tensor]) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in _HALF or tensor.dtype != query.dtype:
            raise RuntimeError(f"FlashAttention only support fp16 and bf16, {name}: {tensor.dtype}")
        if not tensor.is_cuda or tensor.stride(-1) != 1:
            raise RuntimeError(f"{name} must be on CUDA with a contiguous last dimension")
        if tensor.dim() != 3 or tensor.size(-1) % 8 or tensor.size(-1) > 256:
            raise RuntimeError(f"{name}: head_size must be a multiple of 8 up to 256")
    for name, tensor in zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True):
        if tensor.dtype != torch.int32:
            raise RuntimeError(f"{name} must have dtype int32, got {tensor.dtype}")
        if not tensor.is_cuda or not tensor.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous and on CUDA")


def _blocks(
    offsets: tuple[Tensor, Tensor], longest: tuple[int, int]
) -> Iterator[tuple[slice, slice, int]]:
    """Up to 512 queries of a row, its keys, and where the first of these queries is among them."""
    both = [surface.native.peek(each).tolist() for each in offsets]
    for row in range(len(both[0]) - 1):
        queries, keys = (range(each[row], each[row + 1]) for each in both)
        assert len(queries) <= longest[0] and len(keys) <= longest[1]  # CUDA computes nonsense
        for first in queries[::512]:
            block = slice(first, min(first + 512, queries.stop))
            yield block, slice(keys.start, keys.stop), len(keys) - (queries.stop - first)


def _scores(
    query: Tensor, key: Tensor, scale: float, window: tuple[int, int], first: int
) -> Tensor:
    """(heads, q, k) of one row, -inf where a query does not attend. first: of its keys, the one at
    the first query."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    num_queries, num_keys = scores.shape[1:]
    own = torch.arange(num_queries)[:, None] + first
    distance = own - torch.arange(num_keys)
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= -distance > right
    return scores.masked_fill_(hidden, float("-inf"))


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    return (-1 if left is None else left, 0 if is_causal else -1 if right is None else right)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: object,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward of packed rows."""
    assert not dropout_p and not any(each is not None for each in others.values()), others
    offsets = (query_offsets, key_offsets)
    _check(query, key, value, offsets)
    q, k, v = _on_host(query, key, value)
    output = torch.empty_like(q)
    sums = torch.empty(q.shape[1], q.shape[0])
    window = _window(is_causal, window_size_left, window_size_right)
    for queries, keys, first in _blocks(offsets, (max_q, max_k)):
        scores = _scores(q[queries], k[keys], scale or q.shape[-1] ** -0.5, window, first)
        sums[:, queries] = scores.logsumexp(-1)
        shares = scores.softmax(-1)
        output[queries] = torch.einsum("hqk,khd->qhd", shares, v[keys])
    made = [_to_device(output, like=query), _to_device(sums, like=query, dtype=torch.float32)]
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, dtype=torch.uint64, device=query.device)
    return (*made, rng_state, unused, torch.empty(0, dtype=query.dtype, device=query.device))


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_flash_attention_backward of packed rows."""
    offsets = (query_offsets, key_offsets)
    _check(query, key, value, offsets)
    q, k, v = _on_host(query, key, value)
    g, found, of_rows = (surface.native.peek(each).float() for each in (grad, output, sums))
    factor = scale or q.shape[-1] ** -0.5
    window = _window(is_causal, window_size_left, window_size_right)
    grads = [torch.zeros_like(each) for each in (q, k, v)]
    for queries, keys, first in _blocks(offsets, (max_q, max_k)):
        scores = _scores(q[queries], k[keys], factor, window, first)
        shares = (scores - of_rows[:, queries, None]).exp()
        rows = g[queries]
        grads[2][keys] += torch.einsum("hqk,qhd->khd", shares, rows)
        mean = (rows * found[queries]).sum(-1).T[..., None]
        inner = shares * (torch.einsum("qhd,khd->hqk", rows, v[keys]) - mean) * factor
        grads[0][queries] += torch.einsum("hqk,khd->qhd", inner, k[keys])
        grads[1][keys] += torch.einsum("hqk,qhd->khd", inner, q[queries])
    repeats = q.shape[1] // key.shape[1]
    for number in (1, 2):
        grads[number] = grads[number].unflatten(1, (-1, repeats)).sum(2)
    made = [_to_device(each, like=query) for each in grads]
    return made[0], made[1], made[2]


def _on_host(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """In float32, with as many key heads as query heads."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (surface.native.peek(each).float() for each in (query, key, value))
    return q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def _to_device(values: Tensor, *, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    made = torch.empty(values.shape, dtype=dtype or like.dtype, device=like.device)
    surface.native.poke(made, values)
    return made
