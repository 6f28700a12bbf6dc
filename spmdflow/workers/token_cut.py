"""Context parallelism: the ranks of a group divide the tokens of each row among them.

Everything but attention works on the tokens that a rank has. Attention exchanges them for heads
(Ulysses, Jacobs et al. 2023): an all-to-all gives each rank all tokens for a part of the heads, and
a second one brings the results back. All ranks know all rows, so a packed micro-batch is cut
anywhere. What a forward returns, one number for each response token, is joined: every rank then
computes the loss of all tokens, and the gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from spmdflow.derivative import differentiable_once


@dataclass
class Exchanges:
    """Messages between the ranks that divide rows."""

    rank: int
    """Position in the group."""
    group: dist.ProcessGroup
    num_bytes: int = 0
    """What this rank has sent to the others to exchange tokens for heads."""

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


@dataclass(frozen=True)
class TokenCut:
    """Which tokens of a micro-batch a rank has, and where they are among its own."""

    exchanges: Exchanges
    places: Tensor
    """(all tokens of the micro-batch,) int64: the index among the rank's own; -1: not its own."""
    predicting: Tensor
    """(m,) int64, at least one: own tokens that predict a response token, by the own index."""
    slots: Tensor
    """(m,) int64: which of the n response tokens each predicts; n for one that counts nowhere."""

    @classmethod
    def of(cls, exchanges: Exchanges, *, rows: int, length: int, predicting: Tensor) -> TokenCut:
        """The cut of (rows, length) tokens into equal parts of each row, in host memory.

        predicting: (n,) index of the tokens that predict the response tokens, in all rows.
        """
        each = length // exchanges.size
        assert each * exchanges.size == length, (length, exchanges.size)
        columns = torch.arange(length) - exchanges.rank * each
        is_own = (columns >= 0) & (columns < each)
        own = torch.arange(rows)[:, None] * each + columns
        places = torch.where(is_own, own, -1).flatten()
        found = places[predicting]
        slots = (found >= 0).nonzero()[:, 0]
        if not len(slots):
            nothing = torch.zeros(1, dtype=torch.int64)
            return cls(exchanges, places, nothing, torch.full_like(nothing, len(predicting)))
        return cls(exchanges, places, found[slots], slots)

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> TokenCut:
        """The same cut, with `move` applied to each of its tensors."""
        return TokenCut(self.exchanges, move(self.places), move(self.predicting), move(self.slots))

    def own(self, tokens: Tensor) -> Tensor:
        """The own columns of (rows, length, ...), one entry for each token: (rows, length / c)."""
        each = tokens.shape[1] // self.exchanges.size
        return tokens.narrow(1, self.exchanges.rank * each, each).contiguous()

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
