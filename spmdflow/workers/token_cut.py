"""Context parallelism: the ranks of a group divide the tokens of each row among them.

Everything but attention works on the tokens that a rank has. Attention has two ways:

  heads  tokens are exchanged for heads (Ulysses, Jacobs et al. 2023): an all-to-all gives each rank
         all tokens for a part of the heads, and a second one brings the results back. c must divide
         the heads.
  keys   each rank has its own queries and gathers the keys and values of all tokens (Llama 3,
         section 3.3.2). A rank has two of 2 c chunks of a row, one from the front and one from the
         back (zigzag), so that all ranks see equally many keys.

All ranks know all rows, so a packed micro-batch is cut anywhere. What a forward returns, one number
for each response token, is joined: every rank then computes the loss of all tokens, and the
gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from spmdflow.derivative import differentiable_once
from spmdflow.workers.attention import PackedRows, SeenKeys

HEADS = "ulysses"
KEYS = "gather"
"""Ways of attention, as the settings name them."""


@dataclass
class Exchanges:
    """Messages between the ranks that divide rows."""

    rank: int
    """Position in the group."""
    group: dist.ProcessGroup
    way: str = HEADS
    """HEADS or KEYS."""
    num_bytes: int = 0
    """What this rank has sent to the others for attention."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send parts[r] (c, ...) to rank r; return what all ranks have sent, in their order."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        self.num_bytes += parts.nbytes // self.size * (self.size - 1)
        return received

    def all_gather(self, own: Tensor) -> Tensor:
        """Return the tensors (n, ...) of all ranks, in their order: (c n, ...)."""
        gathered = own.new_empty(len(own) * self.size, *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=self.group)
        self.num_bytes += own.nbytes * (self.size - 1)
        return gathered

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return the sum over all ranks of their part number `rank`: (c n, ...) -> (n, ...).

        Added in float32, which a reduce-scatter of NCCL would not do.
        """
        received = self.all_to_all(parts.unflatten(0, (self.size, -1)))
        return received.float().sum(0).to(parts.dtype)

    @property
    def multiple(self) -> int:
        """What the tokens of a row must be a multiple of."""
        return self.size * (2 if self.way == KEYS else 1)

    def columns(self, length: int, rank: int) -> Tensor:
        """(length / c,) int64: which tokens of a row of this length a rank has, ascending."""
        chunk = length // self.multiple
        assert chunk * self.multiple == length, (length, self.multiple)
        firsts = (rank, 2 * self.size - 1 - rank) if self.way == KEYS else (rank,)
        return torch.cat([torch.arange(chunk) + first * chunk for first in firsts])


@dataclass(frozen=True)
class OwnKeys:
    """How the queries of a rank see the keys of all tokens."""

    order: Tensor
    """(T,) int64: the place of each token of a row among those that the ranks have gathered."""
    rows: PackedRows | None
    """Packed: the own tokens as rows, with the keys that each sees. None: rows are padded."""

    @classmethod
    def of(cls, exchanges: Exchanges, length: int, rows: PackedRows | None) -> OwnKeys:
        """Those of a rank, in host memory. rows: of the whole packed sequence."""
        every = [exchanges.columns(length, rank) for rank in range(exchanges.size)]
        order = torch.cat(every).argsort()
        if rows is None:
            return cls(order, None)
        chunk = length // exchanges.multiple
        return cls(order, _rows_of_chunks(rows, every[exchanges.rank][::chunk].tolist(), chunk))

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> OwnKeys:
        """The same, with `move` applied to each tensor."""
        return OwnKeys(move(self.order), self.rows and self.rows.move_tensors(move))


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
class TokenCut:
    """Which tokens of a micro-batch a rank has, and where they are among its own."""

    exchanges: Exchanges
    columns: Tensor
    """(T / c,) int64: the rank's tokens of each row."""
    places: Tensor
    """(all tokens of the micro-batch,) int64: the index among the rank's own; -1: not its own."""
    predicting: Tensor
    """(m,) int64, at least one: own tokens that predict a response token, by the own index."""
    slots: Tensor
    """(m,) int64: which of the n response tokens each predicts; n for one that counts nowhere."""
    keys: OwnKeys | None = None
    """How own queries see keys, if keys are gathered."""

    @classmethod
    def of(
        cls,
        exchanges: Exchanges,
        *,
        shape: tuple[int, int],
        predicting: Tensor,
        rows: PackedRows | None = None,
    ) -> TokenCut:
        """The cut of (rows, length) tokens into equal parts of each row, in host memory.

        predicting: (n,) index of the tokens that predict the response tokens, in all rows. rows: of
        a packed sequence; None: rows are padded.
        """
        count, length = shape
        columns = exchanges.columns(length, exchanges.rank)
        places = torch.full((count, length), -1)
        places[:, columns] = torch.arange(count * len(columns)).view(count, -1)
        places = places.flatten()
        found = places[predicting]
        slots = (found >= 0).nonzero()[:, 0]
        own = found[slots]
        if not len(slots):
            own = torch.zeros(1, dtype=torch.int64)
            slots = torch.full_like(own, len(predicting))
        keys = OwnKeys.of(exchanges, length, rows) if exchanges.way == KEYS else None
        return cls(exchanges, columns, places, own, slots, keys)

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> TokenCut:
        """The same cut, with `move` applied to each of its tensors."""
        return replace(
            self,
            columns=move(self.columns),
            places=move(self.places),
            predicting=move(self.predicting),
            slots=move(self.slots),
            keys=self.keys and self.keys.move_tensors(move),
        )

    def own(self, tokens: Tensor) -> Tensor:
        """The own columns of (rows, length, ...), one entry for each token: (rows, length / c)."""
        return tokens.index_select(1, self.columns)

    def targets(self, targets: Tensor) -> Tensor:
        """(m,): those of the n response tokens that the rank's own tokens predict."""
        return functional.pad(targets, (0, 1))[self.slots]

    def join(self, values: Tensor, num_targets: int) -> Tensor:
        """(m,), one for each of `predicting` -> (n,), one for each response token, on all ranks."""
        spread = values.new_zeros(num_targets + 1).index_copy(0, self.slots, values)
        return self.sum(spread[:num_targets])

    def pick(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(own tokens, H) at these positions of all tokens: (k, H), and (k,) whether it is own."""
        places = self.places[positions]
        return hidden.index_select(0, places.clamp(min=0)), places >= 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, of which each gets the gradient of its own addend.

        Each rank computes the same loss of the sum, so that gradients are not summed.
        """
        result: Tensor = _Sum.apply(values, self.exchanges)  # type: ignore[no-untyped-call]
        return result


def exchange_for_heads(
    exchanges: Exchanges, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(own tokens, ..., heads, d) of query, key and value -> (all tokens, ..., own heads, d).

    Key-value heads that c does not divide are repeated as often as needed. The heads of the query
    must be a multiple of c. One all-to-all.
    """
    size = exchanges.size
    repeats = _repeats(query.shape[-2], key.shape[-2], size)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, -2) for x in (key, value))
    parts = []
    for x in (query, key, value):
        parts.append(x.unflatten(-2, (size, -1)).movedim(-3, 0))  # (c, own, ..., heads / c, d)
    widths = [part.shape[-2] * part.shape[-1] for part in parts]
    joined = torch.cat([part.flatten(-2) for part in parts], -1)
    received = _exchange(joined, exchanges).flatten(0, 1)
    results = []
    for x, part in zip(received.split(widths, -1), parts, strict=True):
        results.append(x.unflatten(-1, part.shape[-2:]))
    return results[0], results[1], results[2]


def exchange_for_tokens(exchanges: Exchanges, output: Tensor) -> Tensor:
    """(all tokens, ..., own heads, d) -> (own tokens, ..., heads, d). One all-to-all."""
    parts = output.unflatten(0, (exchanges.size, -1))
    return _exchange(parts, exchanges).movedim(0, -3).flatten(-3, -2)


def gather_keys(exchanges: Exchanges, order: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """(own tokens, ..., kv heads, d) of key and value -> those of all tokens, in their order.

    order: of `OwnKeys`. One all-gather, and one reduce-scatter in the backward.
    """
    joined = torch.cat([key.flatten(-2), value.flatten(-2)], -1)
    gathered: Tensor = _Gather.apply(joined, exchanges)  # type: ignore[no-untyped-call]
    widths = [x.shape[-2] * x.shape[-1] for x in (key, value)]
    parts = gathered.index_select(0, order).split(widths, -1)
    return [part.unflatten(-1, x.shape[-2:]) for part, x in zip(parts, (key, value), strict=True)]


def own_heads(exchanges: Exchanges, values: Tensor | None) -> Tensor | None:
    """(heads,) -> (own heads,); None stays None."""
    if values is None:
        return None
    each = len(values) // exchanges.size
    return values.narrow(0, exchanges.rank * each, each)


def _repeats(heads: int, kv_heads: int, size: int) -> int:
    """How often each key-value head is repeated, so that `size` divides their number."""
    group = heads // kv_heads
    for repeats in range(1, group + 1):
        if group % repeats == 0 and kv_heads * repeats % size == 0:
            return repeats
    raise AssertionError(f"{heads} heads, {kv_heads} for keys, over {size} ranks")


def _exchange(parts: Tensor, exchanges: Exchanges) -> Tensor:
    """An all-to-all with gradients; see `Exchanges.all_to_all`."""
    result: Tensor = _Exchange.apply(parts, exchanges)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts; the gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, exchanges: Exchanges) -> Tensor:
        """Return the parts of all ranks."""
        ctx.exchanges = exchanges
        return exchanges.all_to_all(parts)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of the parts that were sent."""
        return ctx.exchanges.all_to_all(grad), None


class _Gather(torch.autograd.Function):
    """Gathers the tokens of all ranks; the gradients of each go back to it, and are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, exchanges: Exchanges) -> Tensor:
        """Return the tokens of all ranks."""
        ctx.exchanges = exchanges
        return exchanges.all_gather(own)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients of the own tokens."""
        return ctx.exchanges.reduce_scatter(grad), None


class _Sum(torch.autograd.Function):
    """A sum over ranks, whose gradient each of them has."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, exchanges: Exchanges) -> Tensor:
        """Return the sum, in the precision of the values."""
        total = values.clone()
        dist.all_reduce(total, group=exchanges.group)
        return total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is."""
        return grad, None
