"""Causal attention over rows that lie end to end, without padding: a row attends to itself alone.

One mask over all tokens would cost the square of the total length; here the cost is the sum of the
squared row lengths. PyTorch has kernels for rows of any length in half precision on CUDA: one of
them takes all rows. Otherwise (float32, a CPU, an older GPU or PyTorch), neighbouring rows of equal
length go through the dense kernels together. What only a CPU runs is in cpu.attention.

Rows may share a prompt (samples of GRPO, pairs of DPO). It is then packed and computed once, as a
separate row. The rows that share it have only the tokens after it, and also attend to its keys.
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

from spmdflow.cpu.attention import attend_in_blocks
from spmdflow.derivative import differentiable_once

_VARLEN_TAKES_GROUPED_HEADS = "enable_gqa" in signature(varlen_attn).parameters
"""From torch 2.12; before, key and value heads are repeated to the number of query heads."""


@dataclass(frozen=True)
class PackedRows:
    """The position of each row among the packed tokens."""

    lengths: tuple[int, ...]
    """Tokens of each row, at least 1."""
    offsets: Tensor
    """(b + 1,) int32: where each row begins, and the end of the last."""
    seen: SeenKeys | None = None
    """The visible keys where rows share prompts. None: each row sees only its own tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PackedRows:
        """Rows of these lengths, in host memory."""
        return cls(tuple(lengths), _offsets(lengths))

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> PackedRows:
        """Return the same rows, with `move` applied to each of their tensors."""
        seen = self.seen
        if seen is not None:
            seen = SeenKeys(seen.lengths, move(seen.offsets), move(seen.indices))
        return PackedRows(self.lengths, move(self.offsets), seen)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Return (number of rows, tokens per row, keys per row) for each run of neighbouring rows.

        A run is as many adjacent rows as have the same number of tokens and of keys.
        """
        keys = self.lengths if self.seen is None else self.seen.lengths
        pairs = groupby(zip(self.lengths, keys, strict=True))
        return [(len(list(run)), *sizes) for sizes, run in pairs]


@dataclass(frozen=True)
class SeenKeys:
    """The keys that each row sees, in order. Its own tokens are the last of them."""

    lengths: tuple[int, ...]
    offsets: Tensor
    """(b + 1,) int32: where the keys of each row begin, and the end of the last."""
    indices: Tensor
    """(sum of lengths,) int64: index of each key among the packed tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int], indices: Tensor) -> SeenKeys:
        """The keys at these indices, row by row, in host memory."""
        return cls(tuple(lengths), _offsets(lengths), indices)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


@dataclass(frozen=True)
class AttentionForm:
    """How scores are computed, and how far a token sees."""

    scale: float | None = None
    """Factor of the products of query and key; None: 1 / sqrt(d)."""
    window: int | None = None
    """A token attends to itself and the window - 1 tokens before it; None: no limit."""
    cap: float | None = None
    """Scores are cap * tanh(score / cap) (Gemma 2). None: they are not capped."""
    sinks: Tensor | None = None
    """(heads,): a score that each softmax has in addition, without a value (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """Whether kernels for scaled dot-product attention compute it."""
        return self.cap is None and self.sinks is None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    form: AttentionForm | None = None,
) -> Tensor:
    """Causal attention of packed rows: each row attends only to its own tokens.

    query (N, heads, d), key (N, kv heads, d) and value (N, kv heads, v) of all rows -> (N, heads,
    v). A row that shares a prompt also attends to the prompt's keys (rows.seen). form: None: its
    defaults. Uses one varlen kernel for half precision on a recent CUDA device, if scores are
    neither capped nor have sinks and v = d; otherwise a dense kernel for each run of rows of equal
    length.
    """
    if form is None:
        form = AttentionForm()
    seen = rows.seen
    if seen is not None:
        key, value = (x.index_select(0, seen.indices) for x in (key, value))
    same_width = query.shape[-1] == value.shape[-1]
    if form.is_plain and same_width and has_varlen_kernel(query):
        return _varlen_attention(query, key, value, rows, form)
    return _attention_by_length(query, key, value, rows, form)


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, form: AttentionForm
) -> Tensor:
    """Compute `packed_attention` with one CUDA kernel for all rows.

    key and value: the keys that each row sees, row by row.
    """
    key_offsets = rows.offsets
    key_lengths = rows.lengths
    if rows.seen is not None:
        key_offsets = rows.seen.offsets
        key_lengths = rows.seen.lengths
    options: dict[str, Any] = {}
    if _VARLEN_TAKES_GROUPED_HEADS:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    tokens_before = -1 if form.window is None else form.window - 1
    output = varlen_attn(
        query, key, value, rows.offsets, key_offsets, max(rows.lengths), max(key_lengths),
        scale=form.scale, window_size=(tokens_before, 0), **options,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output


def _attention_by_length(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, form: AttentionForm
) -> Tensor:
    """Compute `packed_attention` with a dense kernel for each run of rows of equal length.

    Works on any device. key and value: the keys that each row sees, row by row.
    """
    runs = rows.runs
    queries = query.split([count * length for count, length, _ in runs])
    keys, values = (x.split([count * length for count, _, length in runs]) for x in (key, value))
    outputs: list[Tensor] = []
    for number, (count, length, num_keys) in enumerate(runs):
        q = queries[number].unflatten(0, (count, length)).transpose(1, 2)  # (rows, heads, T, d)
        k = keys[number].unflatten(0, (count, num_keys)).transpose(1, 2)
        v = values[number].unflatten(0, (count, num_keys)).transpose(1, 2)
        output = dense_attention(q, k, v, form)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    """Causal attention of unpacked rows. The T queries are at the last T of S positions.

    query (b, heads, T, d), key (b, kv heads, S, d), value (b, kv heads, S, v) -> (b, heads, T, v).
    Without a window that matters and with T = S no mask is built. On a CPU, masked attention runs
    in blocks of queries.
    """
    queries = query.shape[2]
    keys = key.shape[2]
    if form.is_plain and queries == keys and (form.window is None or queries <= form.window):
        return _masked_attention(query, key, value, None, form.scale)

    def attend(block: Tensor, num_keys: int) -> Tensor:
        mask = _band(block.shape[2], num_keys, form.window, query.device)
        seen_keys = key[:, :, :num_keys]
        seen_values = value[:, :, :num_keys]
        if form.is_plain:
            return _masked_attention(block, seen_keys, seen_values, mask, form.scale)
        return _attention_by_scores(block, seen_keys, seen_values, mask, form)

    if query.is_cpu:
        return attend_in_blocks(query, keys, attend)
    return attend(query, keys)


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Scaled dot-product attention with a mask (True: attend), or causal if the mask is None.

    On CUDA, key and value heads are repeated to the number of query heads where kernels need that.
    """
    if query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # of the CUDA kernels only flash supports grouped heads: half precision and no mask
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _attention_by_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, form: AttentionForm
) -> Tensor:
    """Attention whose scores are capped or have sinks, which no kernel of PyTorch computes.

    Stores the scores (b, heads, T, S). mask (T, S): True where a query attends.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if form.scale is None else form.scale
    scores = (query @ key.transpose(2, 3)).float() * scale
    if form.cap is not None:
        scores = form.cap * torch.tanh(scores / form.cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if form.sinks is not None:
        sinks = form.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(T, S) bool: True for the last `window` positions up to that of each query."""
    positions = torch.arange(keys, device=device)
    distance = positions[keys - queries :, None] - positions
    return (distance >= 0) & (distance < (window or keys))


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding (Su et al. 2021) to query and key: (b, heads, T, d) each.

    cos and sin: (b, T, d), the first half of sin negated. The result is x * cos + (x with its
    halves swapped) * sin.
    """
    cos = cos[:, None]
    sin = sin[:, None]
    outputs: list[Tensor] = [_Rotation.apply(x, cos, sin) for x in (query, key)]  # type: ignore[no-untyped-call]
    return outputs[0], outputs[1]


class _Rotation(torch.autograd.Function):
    """Reads x twice and saves none of it for backward; dx = g * cos + (g * sin, halves swapped)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `rotate`."""
        ctx.save_for_backward(cos, sin)
        return _apply_rotation(x, cos, _halves(sin))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x alone; see the class."""
        cos, sin = ctx.saved_tensors
        return _apply_rotation(grad, cos, _halves(sin).flip(-2)), None, None


def _apply_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    output = x * cos
    _halves(output).addcmul_(_halves(x).flip(-2), sin)
    return output


def _halves(x: Tensor) -> Tensor:
    """(..., d) -> (..., 2, d/2), a view."""
    return x.unflatten(-1, (2, -1))


def has_varlen_kernel(query: Tensor) -> bool:
    """Whether PyTorch's flash kernels for rows of any length support this query."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
