"""Context parallelism: the ranks of a group divide the tokens of each row among them.

Everything but attention works on the tokens that a rank has. There are three kinds of attention:

  ulysses  tokens are exchanged for heads (Jacobs et al. 2023): an all-to-all gives each rank all
           tokens for a part of the heads, and a second one brings the results back. c must divide
           the heads.
  gather   each rank has its own queries and gathers the keys and values of all tokens (Llama 3,
           section 3.3.2). A rank has two of 2 c chunks of a row, one from the front and one from
           the back (zigzag), so that all ranks see equally many keys.
  ring     each rank has its own queries, and keys and values pass from rank to rank
           (workers.ring_attention). Tokens are divided as for gather.

All ranks know all rows, so a packed micro-batch may be divided at any token. What a forward
returns, one number for each response token, is summed over the ranks: each then computes the loss
of all tokens, and the gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from spmdflow.derivative import apply_linear
from spmdflow.workers.attention import (
    AttentionForm,
    PackedRows,
    SeenKeys,
    dense_attention,
    packed_attention,
)
from spmdflow.workers.context_group import GATHER, RING, ContextGroup
from spmdflow.workers.ring_attention import RingSteps, ring_attention


@dataclass(frozen=True)
class GatheredKeys:
    """How the queries of a rank see the keys of all tokens, which it has gathered."""

    order: Tensor
    """(T,) int64: the index of each token of a row among the gathered ones."""
    rows: PackedRows | None
    """Of packed rows: this rank's tokens as rows, with the keys that each sees. None: padded."""

    @classmethod
    def of(cls, group: ContextGroup, length: int, rows: PackedRows | None) -> GatheredKeys:
        """Return those of a rank, in host memory. rows: of the whole packed sequence."""
        every = [group.columns(length, rank) for rank in range(group.size)]
        order = torch.cat(every).argsort()
        if rows is None:
            return cls(order, None)
        chunk = length // group.multiple
        return cls(order, _rows_of_chunks(rows, every[group.rank][::chunk].tolist(), chunk))

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> GatheredKeys:
        """The same, with `move` applied to each tensor."""
        return GatheredKeys(move(self.order), self.rows and self.rows.move_tensors(move))


def _rows_of_chunks(rows: PackedRows, starts: Sequence[int], chunk: int) -> PackedRows:
    """Return the parts of packed rows that lie in chunks of the sequence, each with its keys.

    A part sees what its row sees up to the part's last token. starts: of the chunks.
    """
    lengths = []
    sizes = []
    keys = []
    ends = torch.tensor(rows.lengths).cumsum(0).tolist()
    seen = torch.arange(ends[-1]) if rows.seen is None else rows.seen.indices
    seen_sizes = rows.lengths if rows.seen is None else rows.seen.lengths
    keys_of_rows = seen.split(list(seen_sizes))
    for start in starts:
        for end, length, all_keys in zip(ends, rows.lengths, keys_of_rows, strict=True):
            first = max(start, end - length)
            last = min(start + chunk, end)
            if first < last:
                visible = all_keys[: len(all_keys) - (end - last)]
                lengths.append(last - first)
                sizes.append(len(visible))
                keys.append(visible)
    return replace(PackedRows.of(lengths), seen=SeenKeys.of(sizes, torch.cat(keys)))


@dataclass(frozen=True)
class TokenShard:
    """This rank's part of the tokens of a micro-batch."""

    group: ContextGroup
    columns: Tensor
    """(T / c,) int64: the rank's tokens of each row."""
    index: Tensor
    """(all tokens of the micro-batch,) int64: the index of each in the shard; -1: not in it."""
    predicting: Tensor
    """(m,) int64, m >= 1: the index in the shard of its tokens that predict a response token."""
    slots: Tensor
    """(m,) int64: which of the n response tokens each predicts; n if it predicts none."""
    keys: GatheredKeys | None = None
    """How this rank's queries see keys, if keys are gathered."""
    ring: RingSteps | None = None
    """What they see in each step of a ring."""

    @classmethod
    def of(
        cls,
        group: ContextGroup,
        *,
        shape: tuple[int, int],
        predicting: Tensor,
        rows: PackedRows | None = None,
    ) -> TokenShard:
        """Return the shard of a micro-batch of which each rank has as many tokens of each row.

        It is in host memory. shape: rows and length. predicting: (n,) index of the tokens that
        predict the response tokens, in all rows. rows: of a packed sequence; None: rows are padded.
        """
        count, length = shape
        columns = group.columns(length, group.rank)
        index = torch.full((count, length), -1)
        index[:, columns] = torch.arange(count * len(columns)).view(count, -1)
        index = index.flatten()
        in_shard = index[predicting]
        slots = (in_shard >= 0).nonzero()[:, 0]
        own = in_shard[slots]
        if not len(slots):
            own = torch.zeros(1, dtype=torch.int64)
            slots = torch.full_like(own, len(predicting))
        shard = cls(group, columns, index, own, slots)
        if group.attention == GATHER:
            return replace(shard, keys=GatheredKeys.of(group, length, rows))
        if group.attention == RING:
            whole_rows = PackedRows.of([length] * count) if rows is None else rows
            owners = torch.empty(length, dtype=torch.int64)
            for rank in range(group.size):
                owners[group.columns(length, rank)] = rank
            return replace(shard, ring=RingSteps.of(group, whole_rows, owners.repeat(count)))
        return shard

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> TokenShard:
        """The same shard, with `move` applied to each of its tensors."""
        return replace(
            self,
            columns=move(self.columns),
            index=move(self.index),
            predicting=move(self.predicting),
            slots=move(self.slots),
            keys=self.keys and self.keys.move_tensors(move),
            ring=self.ring and self.ring.move_tensors(move),
        )

    def select(self, values: Tensor) -> Tensor:
        """The values of this rank's tokens: (rows, length, ...) -> (rows, length / c, ...)."""
        return values.index_select(1, self.columns)

    def targets(self, targets: Tensor) -> Tensor:
        """(n,) response tokens -> (m,): those that this rank's tokens predict."""
        return functional.pad(targets, (0, 1))[self.slots]

    def join(self, values: Tensor, num_targets: int) -> Tensor:
        """(m,), one for each of `predicting` -> (n,), one for each response token, on all ranks."""
        spread = values.new_zeros(num_targets + 1).index_copy(0, self.slots, values)
        return self.sum(spread[:num_targets])

    def pick(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states at k positions among all tokens, and which of them are real.

        hidden: (tokens of the shard, H). The results are (k, H) and (k,) bool: False where another
        rank has the token.
        """
        index = self.index[positions]
        return hidden.index_select(0, index.clamp(min=0)), index >= 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks. Each rank gets the gradient of its own addend.

        Each computes the same loss of the sum, so gradients are not summed.
        """

        def add(x: Tensor) -> Tensor:
            total = x.clone()
            dist.all_reduce(total, group=self.group.process_group)
            return total

        return apply_linear(values, add, lambda gradient: gradient)


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows | None,
    form: AttentionForm,
    shard: TokenShard,
) -> Tensor:
    """Attention under context parallelism; all ranks of the group call it together.

    query (b, heads, T / c, d), key and value (b, kv heads, T / c, d) -> (b, T / c, heads, d).
    """
    group = shard.group
    if shard.ring is not None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        output = ring_attention(group, shard.ring, q, k, v, form)
        return output.unflatten(0, (len(query), -1))
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))  # (T / c, b, heads, d)
    if shard.keys is not None:
        k, v = gather_keys(group, shard.keys.order, k, v)
        own_rows = shard.keys.rows
        if own_rows is None:
            return _attend_in_chunks(query, k, v, form, group)
        return packed_attention(q.squeeze(1), k.squeeze(1), v.squeeze(1), own_rows, form)[None]
    form = replace(form, sinks=own_heads(group, form.sinks))
    q, k, v = exchange_for_heads(group, q, k, v)
    if rows is None:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        output = dense_attention(q, k, v, form).permute(2, 0, 1, 3)
    else:
        output = packed_attention(q.squeeze(1), k.squeeze(1), v.squeeze(1), rows, form)[:, None]
    return exchange_for_tokens(group, output).transpose(0, 1)


def _attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, group: ContextGroup
) -> Tensor:
    """Attention of padded rows of which a rank has the queries of some chunks.

    query (b, heads, T / c, d), key and value (T, b, kv heads, d) -> (b, T / c, heads, d).
    """
    k, v = (x.permute(1, 2, 0, 3) for x in (key, value))
    length = len(key)
    chunk = length // group.multiple
    outputs = []
    ends = (group.columns(length, group.rank)[chunk - 1 :: chunk] + 1).tolist()
    for part, end in zip(query.split(chunk, 2), ends, strict=True):
        outputs.append(dense_attention(part, k[:, :, :end], v[:, :, :end], form))
    return torch.cat(outputs, 2).transpose(1, 2)


def exchange_for_heads(
    group: ContextGroup, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(T / c, ..., heads, d) of query, key and value -> (T, ..., heads / c, d).

    Key-value heads that c does not divide are repeated as often as needed. The heads of the query
    must be a multiple of c. One all-to-all.
    """
    size = group.size
    repeats = _repeats(query.shape[-2], key.shape[-2], size)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, -2) for x in (key, value))
    parts = []
    for x in (query, key, value):
        parts.append(x.unflatten(-2, (size, -1)).movedim(-3, 0))  # (c, T / c, ..., heads / c, d)
    widths = [part.shape[-2] * part.shape[-1] for part in parts]
    joined = torch.cat([part.flatten(-2) for part in parts], -1)
    received = _all_to_all(group, joined).flatten(0, 1)
    results = []
    for x, part in zip(received.split(widths, -1), parts, strict=True):
        results.append(x.unflatten(-1, part.shape[-2:]))
    return results[0], results[1], results[2]


def exchange_for_tokens(group: ContextGroup, output: Tensor) -> Tensor:
    """(T, ..., heads / c, d) -> (T / c, ..., heads, d). One all-to-all."""
    parts = output.unflatten(0, (group.size, -1))
    return _all_to_all(group, parts).movedim(0, -3).flatten(-3, -2)


def gather_keys(group: ContextGroup, order: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """(T / c, ..., kv heads, d) of key and value -> (T, ..., kv heads, d), in order of the tokens.

    order: see `GatheredKeys`. One all-gather, and one reduce-scatter in the backward.
    """
    joined = torch.cat([key.flatten(-2), value.flatten(-2)], -1)
    gathered = apply_linear(joined, group.all_gather, group.reduce_scatter)
    widths = [x.shape[-2] * x.shape[-1] for x in (key, value)]
    parts = gathered.index_select(0, order).split(widths, -1)
    return [part.unflatten(-1, x.shape[-2:]) for part, x in zip(parts, (key, value), strict=True)]


def own_heads(group: ContextGroup, values: Tensor | None) -> Tensor | None:
    """(heads,) -> (heads / c,): those of this rank after `exchange_for_heads`. None stays None."""
    if values is None:
        return None
    each = len(values) // group.size
    return values.narrow(0, group.rank * each, each)


def _repeats(heads: int, kv_heads: int, size: int) -> int:
    """How often each key-value head is repeated, so that `size` divides their number."""
    queries_per_key = heads // kv_heads
    for repeats in range(1, queries_per_key + 1):
        if queries_per_key % repeats == 0 and kv_heads * repeats % size == 0:
            return repeats
    raise AssertionError(f"{heads} heads, {kv_heads} for keys, over {size} ranks")


def _all_to_all(group: ContextGroup, parts: Tensor) -> Tensor:
    """An all-to-all with gradients, which go the way back; see `ContextGroup.all_to_all`."""
    return apply_linear(parts, group.all_to_all, group.all_to_all)
