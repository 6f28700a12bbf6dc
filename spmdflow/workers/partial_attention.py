"""Attention over some of the keys that a query sees, and its gradient (for ring attention).

The result over all keys is a mean of the results over parts of them, weighted by the sums of their
exponentials. So each part returns the logarithm of its sum (lse) with its result. A backward over a
part takes the result and the lse over all keys: the weights of the part are then those of the whole
softmax (Dao 2023, FlashAttention-2, section 3.1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdflow.workers.attention import AttentionForm, PackedRows, has_varlen_kernel

_MAX_SCORES = 1 << 24
"""Scores that are stored at a time, where no kernel computes attention without storing them."""
_aten = torch.ops.aten


@dataclass(frozen=True)
class PartialRows:
    """Queries of packed rows, and those keys of theirs that one rank has."""

    rows: PackedRows
    """rows.seen: the keys, as indices into the tokens of that rank."""
    queries: Tensor | None
    """(n,) int64: index of each query among the tokens of this rank, ascending; None: all."""
    query_positions: Tensor
    """(n,) int64: position of each query in its row."""
    key_positions: Tensor
    """(number of keys,) int64: position of each key in the row of its queries."""
    is_causal: bool
    """Whether the keys of each row are those of its queries. False: all lie before them."""
    reach: int
    """The largest distance of a query from one of its keys."""

    def of_queries(self, values: Tensor, dim: int = 0) -> Tensor:
        """The values of its queries, of one for each token of this rank along `dim`."""
        return values if self.queries is None else values.index_select(dim, self.queries)

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> PartialRows:
        """The same, with `move` applied to each tensor."""
        return replace(
            self,
            rows=self.rows.move_tensors(move),
            queries=None if self.queries is None else move(self.queries),
            query_positions=move(self.query_positions),
            key_positions=move(self.key_positions),
        )


@dataclass(frozen=True)
class _Block:
    """Rows of equal length, or some queries of one row."""

    num_rows: int
    tokens: slice
    """Which queries of `PartialRows`."""
    keys: slice
    """Which of its keys."""
    mask: Tensor | None
    """(rows, 1, T, S) bool, True: attend. None: a query attends to all keys, or is_causal."""
    is_causal: bool
    """There is no mask, and query i attends to the keys up to i: T = S."""


def attend_to_part(
    query: Tensor, key: Tensor, value: Tensor, part: PartialRows, form: AttentionForm
) -> tuple[Tensor, Tensor]:
    """Return the attention of some queries over some of their keys, and the lse of their scores.

    query (n, heads, d), key (k, kv heads, d) and value (k, kv heads, v): those of `part` -> (n,
    heads, v) and (heads, n) float32. A query that sees none of the keys gets 0 and -inf. form.sinks
    do not count here.
    """
    if _uses_varlen(query, value, form):
        offsets, lengths = _seen(part.rows)
        output, lse, *_ = _aten._flash_attention_forward(
            query, key, value, part.rows.offsets, offsets, max(part.rows.lengths), max(lengths),
            0.0, part.is_causal, False, scale=form.scale,
        )  # fmt: skip
        return output, lse
    output = query.new_empty(*query.shape[:2], value.shape[-1])
    lse = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    has_kernel = _has_cpu_kernel(query, value, form)
    for block in _blocks(part, query.shape[1], form, stores_scores=not has_kernel):
        q = _batched(query[block.tokens], block.num_rows)
        k = _batched(key[block.keys], block.num_rows)
        v = _batched(value[block.keys], block.num_rows)
        if has_kernel:
            result, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, block.is_causal, attn_mask=_addend(block.mask, q), scale=form.scale
            )
            if block.mask is not None:  # the kernel says 0 for queries without keys
                sums = sums.masked_fill(~block.mask.any(-1), -torch.inf)
        else:
            result, sums = _attend_by_scores(q, k, v, block.mask, form)
        output[block.tokens] = _packed(result)
        lse[:, block.tokens] = sums.transpose(0, 1).flatten(1)
    return output, lse


def partial_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    part: PartialRows,
    form: AttentionForm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value: what this part of the keys adds to them.

    gradient and output (n, heads, v), lse (heads, n): of the result over all keys. The other
    arguments: see `attend_to_part`.
    """
    if _uses_varlen(query, value, form):
        offsets, lengths = _seen(part.rows)
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # there is no dropout
        gradients: tuple[Tensor, Tensor, Tensor] = _aten._flash_attention_backward(
            gradient, query, key, value, output, lse, part.rows.offsets, offsets,
            max(part.rows.lengths), max(lengths), 0.0, part.is_causal, unused, unused[:0],
            scale=form.scale,
        )  # fmt: skip
        return gradients
    of_query = torch.empty_like(query)
    of_key = torch.zeros_like(key, dtype=torch.float32)
    of_value = torch.zeros_like(value, dtype=torch.float32)
    has_kernel = _has_cpu_kernel(query, value, form)
    for block in _blocks(part, query.shape[1], form, stores_scores=not has_kernel):
        q, g, out = (_batched(x[block.tokens], block.num_rows) for x in (query, gradient, output))
        k = _batched(key[block.keys], block.num_rows)
        v = _batched(value[block.keys], block.num_rows)
        sums = lse[:, block.tokens].unflatten(1, (block.num_rows, -1)).transpose(0, 1)
        if has_kernel:
            of_block = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, out, sums, 0.0, block.is_causal,
                attn_mask=_addend(block.mask, q), scale=form.scale,
            )  # fmt: skip
        else:
            of_block = _gradients_by_scores(g, q, k, v, out, sums, block.mask, form)
        of_query[block.tokens] = _packed(of_block[0])
        of_key[block.keys] += _packed(of_block[1])
        of_value[block.keys] += _packed(of_block[2])
    return of_query, of_key, of_value


def _uses_varlen(query: Tensor, value: Tensor, form: AttentionForm) -> bool:
    """Whether one CUDA kernel takes all rows. It counts a window from the last key."""
    plain = form.cap is None and form.window is None
    return plain and query.shape[-1] == value.shape[-1] and has_varlen_kernel(query)


def _has_cpu_kernel(query: Tensor, value: Tensor, form: AttentionForm) -> bool:
    """Whether PyTorch's CPU kernel computes it, which returns the lse too."""
    return query.is_cpu and form.cap is None and query.shape[-1] == value.shape[-1]


def _seen(rows: PackedRows) -> tuple[Tensor, tuple[int, ...]]:
    """Return the offsets and the lengths of the keys."""
    assert rows.seen is not None
    return rows.seen.offsets, rows.seen.lengths


def _blocks(
    part: PartialRows, heads: int, form: AttentionForm, *, stores_scores: bool
) -> Iterator[_Block]:
    """Yield neighbouring rows of equal length together.

    Where the scores or masks of these would be too many, yield some queries of one row at a time.
    """
    has_window = form.window is not None and form.window <= part.reach
    token = first_key = 0
    for num_rows, length, num_keys in part.rows.runs:
        is_masked = has_window or (part.is_causal and stores_scores)
        max_queries = max(1, _MAX_SCORES // (num_keys * (heads if stores_scores else 1)))
        if num_rows * length <= max_queries or not (is_masked or stores_scores):
            keys = slice(first_key, first_key + num_rows * num_keys)
            tokens = slice(token, token + num_rows * length)
            yield _block(part, num_rows, tokens, keys, form.window, masked=is_masked)
        else:
            for row in range(num_rows):
                end = token + (row + 1) * length
                first = first_key + row * num_keys
                own_keys = slice(first, first + num_keys)
                for start in range(end - length, end, max_queries):
                    some = slice(start, min(start + max_queries, end))
                    yield _block(part, 1, some, own_keys, form.window, masked=is_masked)
        token += num_rows * length
        first_key += num_rows * num_keys


def _block(
    part: PartialRows,
    num_rows: int,
    tokens: slice,
    keys: slice,
    window: int | None,
    *,
    masked: bool,
) -> _Block:
    """Return a block; masked: with a mask for causality and, unless None, for a window."""
    mask = None
    if masked:
        queries = part.query_positions[tokens].view(num_rows, 1, -1, 1)
        distance = queries - part.key_positions[keys].view(num_rows, 1, 1, -1)
        mask = distance >= 0
        if window is not None:
            mask &= distance < window
    return _Block(num_rows, tokens, keys, mask, part.is_causal and not masked)


def _batched(x: Tensor, num_rows: int) -> Tensor:
    """(rows T, heads, d) -> (rows, heads, T, d)."""
    return x.unflatten(0, (num_rows, -1)).transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """(rows, heads, T, d) -> (rows T, heads, d)."""
    return x.transpose(1, 2).flatten(0, 1)


def _addend(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What the kernel adds to scores: 0 where a query attends, otherwise -inf."""
    if mask is None:
        return None
    return query.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, form: AttentionForm) -> Tensor:
    """(b, heads, T, S) float32, capped, -inf where the mask is False."""
    scale = query.shape[-1] ** -0.5 if form.scale is None else form.scale
    scores = (query @ key.transpose(2, 3)).float() * scale
    if form.cap is not None:
        scores = form.cap * torch.tanh(scores / form.cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores


def _attend_by_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: AttentionForm
) -> tuple[Tensor, Tensor]:
    """(b, heads, T, v) and the lse (b, heads, T): attention that no kernel computes."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = _scores(query, key, mask, form)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights.to(value.dtype) @ value, lse


def _gradients_by_scores(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    form: AttentionForm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. With weights p = exp(s - lse) of scores s:

    dv = p' g, ds = p (g v' - sum(g out)), and dq = ds k, dk = ds' q, times the scale and, for
    capped scores, times 1 - (s / cap)^2.
    """
    kv_heads = key.shape[1]
    repeats = query.shape[1] // kv_heads
    key, value = (x.repeat_interleave(repeats, 1).float() for x in (key, value))
    query = query.float()
    gradient = gradient.float()
    scores = _scores(query, key, mask, form)
    weights = (scores - lse[..., None]).exp()
    mean = (gradient * output).sum(-1, keepdim=True)
    of_scores = weights * (gradient @ value.transpose(2, 3) - mean)
    if form.cap is not None:
        squares = (scores / form.cap).square().masked_fill(weights == 0, 0.0)  # scores of -inf
        of_scores = of_scores * (1 - squares)
    of_scores = of_scores * (query.shape[-1] ** -0.5 if form.scale is None else form.scale)
    of_key = (of_scores.transpose(2, 3) @ query).unflatten(1, (kv_heads, repeats)).sum(2)
    of_value = (weights.transpose(2, 3) @ gradient).unflatten(1, (kv_heads, repeats)).sum(2)
    return of_scores @ key, of_key, of_value
