"""Ring attention: keys and values travel from rank to rank, each of which has its own queries.

Liu et al. 2023, with two chunks of a row for each rank (zigzag), so that all have the same work
and none computes scores that causality masks. In step s a rank has the keys of rank - s, and
attends to those that its queries see, while the next ones are on their way. The results of the
steps are joined by the sums of their exponentials (workers.partial_attention). For the backward a
rank stores its own keys alone: they travel once more, and their gradients return to their rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spmdflow.derivative import differentiable_once
from spmdflow.workers.attention import AttentionForm, PackedRows, SeenKeys
from spmdflow.workers.context_group import ContextGroup
from spmdflow.workers.partial_attention import PartialRows, attend_to_part, partial_gradients


@dataclass(frozen=True)
class RingSteps:
    """What a rank's queries see in each step, for one micro-batch."""

    parts: tuple[tuple[PartialRows, ...], ...]
    """For each of c steps, the parts of the keys that the rank then has; () if its queries see none
    of them. The first part of the first step is causal: queries and keys are the same tokens."""

    @classmethod
    def of(cls, group: ContextGroup, rows: PackedRows, owners: Tensor) -> RingSteps:
        """Return those of a rank, in host memory.

        rows: all rows of the micro-batch, end to end. owners: (all tokens,) int64: the rank of
        each token.
        """
        index_of = torch.empty_like(owners)
        """Of each token among those of its rank."""
        for rank in range(group.size):
            own = owners == rank
            index_of[own] = torch.arange(int(own.sum()))
        causal = _PartBuilder(is_causal=True)
        earlier = [_PartBuilder(is_causal=False) for _ in range(group.size)]
        for piece in _own_pieces(group.rank, rows, owners):
            queries = index_of[piece.tokens]
            first = piece.first_position
            own_positions = torch.arange(first, first + len(queries))
            causal.add(queries, first, queries, own_positions)
            ranks = owners[piece.keys[:first]]
            order = ranks.argsort(stable=True)
            counts = ranks.bincount(minlength=group.size).tolist()
            for rank, positions in enumerate(order.split(counts)):
                if len(positions):
                    keys = index_of[piece.keys[positions]]
                    earlier[(group.rank - rank) % group.size].add(queries, first, keys, positions)
        num_own = int((owners == group.rank).sum())
        parts = []
        for step, builder in enumerate(earlier):
            builders = [causal, builder] if step == 0 else [builder]
            parts.append(tuple(each.build(num_own) for each in builders if each.queries))
        return cls(tuple(parts))

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> RingSteps:
        """The same, with `move` applied to each tensor."""
        moved = []
        for parts in self.parts:
            moved.append(tuple(part.move_tensors(move) for part in parts))
        return RingSteps(tuple(moved))


@dataclass(frozen=True)
class _Piece:
    """Adjacent tokens of a row that one rank has."""

    tokens: slice
    """Among all tokens."""
    first_position: int
    """Position of the first one in its row."""
    keys: Tensor
    """(its last position + 1,) int64: all that its queries see, as indices of tokens."""


def _own_pieces(rank: int, rows: PackedRows, owners: Tensor) -> list[_Piece]:
    """Return the pieces of all rows that a rank has, in order. rows, owners: see `RingSteps.of`."""
    ends = torch.tensor(rows.lengths).cumsum(0).tolist()
    seen = torch.arange(ends[-1]) if rows.seen is None else rows.seen.indices
    sizes = rows.lengths if rows.seen is None else rows.seen.lengths
    pieces = []
    for end, length, keys in zip(ends, rows.lengths, seen.split(list(sizes)), strict=True):
        runs, counts = owners[end - length : end].unique_consecutive(return_counts=True)
        start = end - length
        for owner, count in zip(runs.tolist(), counts.tolist(), strict=True):
            if owner == rank:
                num_keys = len(keys) - (end - start - count)
                piece = _Piece(slice(start, start + count), num_keys - count, keys[:num_keys])
                pieces.append(piece)
            start += count
    return pieces


class _PartBuilder:
    """Collects the rows of a `PartialRows`."""

    def __init__(self, *, is_causal: bool) -> None:
        self.is_causal = is_causal
        self.queries: list[Tensor] = []
        self.query_positions: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.key_positions: list[Tensor] = []

    def add(self, queries: Tensor, first: int, keys: Tensor, key_positions: Tensor) -> None:
        """Add adjacent queries of one row, the first at this position, and keys of theirs."""
        self.queries.append(queries)
        self.query_positions.append(torch.arange(first, first + len(queries)))
        self.keys.append(keys)
        self.key_positions.append(key_positions)

    def build(self, num_own: int) -> PartialRows:
        """Return the part, to which rows were added. num_own: tokens of this rank."""
        reach = 0
        for queries, keys in zip(self.query_positions, self.key_positions, strict=True):
            reach = max(reach, int(queries[-1] - keys[0]))
        lengths = [len(queries) for queries in self.queries]
        seen = SeenKeys.of([len(keys) for keys in self.keys], torch.cat(self.keys))
        return PartialRows(
            rows=replace(PackedRows.of(lengths), seen=seen),
            queries=None if sum(lengths) == num_own else torch.cat(self.queries),
            query_positions=torch.cat(self.query_positions),
            key_positions=torch.cat(self.key_positions),
            is_causal=self.is_causal,
            reach=reach,
        )


def ring_attention(
    group: ContextGroup,
    steps: RingSteps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: AttentionForm,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, which call it together.

    query (N, heads, d), key (N, kv heads, d) and value (N, kv heads, v) of this rank's tokens ->
    (N, heads, v). The backward is not differentiable.
    """
    output: Tensor = _Ring.apply(query, key, value, form.sinks, group, steps, form)  # type: ignore[no-untyped-call]
    return output


class _Ring(torch.autograd.Function):
    """See `ring_attention`. Saves the rank's own query, key and value, the output and its lse."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        group: ContextGroup,
        steps: RingSteps,
        form: AttentionForm,
    ) -> Tensor:
        """Return the output, in the dtype of the query."""
        joined = torch.cat([key.flatten(1), value.flatten(1)], 1)
        heads = query.shape[1]
        output = query.new_zeros(len(query), heads, value.shape[-1], dtype=torch.float32)
        lse = output.new_full((heads, len(query)), -torch.inf)
        for step, parts in enumerate(steps.parts):
            coming = group.start_shift(joined, 1) if step < group.size - 1 else None
            for part in parts:
                k, v = _keys_of(part, joined, key, value)
                result = attend_to_part(part.of_queries(query), k, v, part, form)
                join_result(output, lse, part, *result)
            if coming is not None:
                joined = coming.wait()
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.float()[:, None])
            output *= (lse - total).exp().T[..., None]
            lse = total
        ctx.ring = (group, steps, form)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        group, steps, form = ctx.ring
        query, key, value, sinks, output, lse = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_query = torch.zeros_like(query, dtype=torch.float32)
        joined = torch.cat([key.flatten(1), value.flatten(1)], 1)
        of_own = torch.zeros_like(joined, dtype=torch.float32)
        returning = None
        for step, parts in enumerate(steps.parts):
            coming = group.start_shift(joined, 1) if step < group.size - 1 else None
            of_joined = torch.zeros_like(joined, dtype=torch.float32)
            for part in parts:
                k, v = _keys_of(part, joined, key, value)
                added = partial_gradients(
                    part.of_queries(gradient), part.of_queries(query), k, v,
                    part.of_queries(output), part.of_queries(lse, 1), part, form,
                )  # fmt: skip
                _add_gradients(of_query, of_joined, part, *added)
            if returning is not None:
                of_own += returning.wait()
                returning = None
            if step:
                returning = group.start_shift(of_joined.to(key.dtype), -step)
            else:
                of_own += of_joined
            if coming is not None:
                joined = coming.wait()
        if returning is not None:
            of_own += returning.wait()
        of_sinks = None
        if sinks is not None:
            mean = (gradient.float() * output).sum(-1).T  # (heads, N)
            of_sinks = -((sinks.float()[:, None] - lse).exp() * mean).sum(1).to(sinks.dtype)
        widths = [key[0].numel(), value[0].numel()]
        of_key, of_value = of_own.to(key.dtype).split(widths, 1)
        of_key = of_key.view_as(key)
        of_value = of_value.view_as(value)
        return of_query.to(query.dtype), of_key, of_value, of_sinks, None, None, None


def _keys_of(
    part: PartialRows, joined: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a part, in the shapes of key and value; joined: (N, both)."""
    assert part.rows.seen is not None
    selected = joined.index_select(0, part.rows.seen.indices)
    keys, values = selected.split([key[0].numel(), value[0].numel()], 1)
    return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])


def join_result(
    output: Tensor, lse: Tensor, part: PartialRows, result: Tensor, sums: Tensor
) -> None:
    """Join the result of a part, with its lse `sums`, to what its queries have so far.

    output (N, heads, v) and lse (heads, N) are float32 and changed in place.
    """
    old = part.of_queries(lse, 1)
    new = torch.logaddexp(old, sums)
    safe = new.masked_fill(new == -torch.inf, 0.0)  # of queries that have seen no key yet
    old_weight = (old - safe).exp().T[..., None]  # (n, heads, 1)
    added = result.float().mul_((sums - safe).exp().T[..., None])
    if part.queries is None:
        output.mul_(old_weight).add_(added)
        lse.copy_(new)
    else:
        joined = part.of_queries(output).mul_(old_weight).add_(added)
        output.index_copy_(0, part.queries, joined)
        lse.index_copy_(1, part.queries, new)


def _add_gradients(
    of_query: Tensor,
    of_joined: Tensor,
    part: PartialRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> None:
    """Add a part's gradients of query, key and value to the sums, in float32 and in place."""
    assert part.rows.seen is not None
    if part.queries is None:
        of_query.add_(query)
    else:
        of_query.index_add_(0, part.queries, query.float())
    width = key[0].numel()
    for columns, added in ((slice(width), key), (slice(width, None), value)):
        of_joined[:, columns].index_add_(0, part.rows.seen.indices, added.flatten(1).float())
