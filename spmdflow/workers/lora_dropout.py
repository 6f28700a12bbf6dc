"""Dropout of the inputs of adapters, whose masks are a function of the text, not of the layout.

Whether an element of a layer's input is dropped follows from a hash of the run's seed, the number
of optimizer steps, the layer's name, the number of the element, and the tokens of the row up to
this one. So a run has the same masks on any number of ranks, in any micro-batches, packed or
padded, with recomputation, and after a resume. Rows with the same prompt have the same masks in it,
because a prompt that rows share may be computed once. The hash is the finalizer of MurmurHash3
(Appleby), in 32 bits. Knows no ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdflow.data.row_id import seed_of
from spmdflow.workers.attention import PackedRows
from spmdflow.workers.micro_batch import MicroBatch

_BITS = 24
"""Bits of a hash that decide whether an element is dropped."""
_ODD_64 = (-7046029254386353131, -4658895280553007687)
_ODD_32 = (-2048144789, -1028477387)
"""Odd constants by which hashes are multiplied, as signed numbers."""


class AdapterDropout:
    """The dropout of all adapters of a model. Off before `start` and after `stop`."""

    def __init__(self, probability: float, seed: int) -> None:
        """probability: that an element is dropped, at least 0 and below 1. seed: of the run."""
        self.probability = probability
        self._seed = seed
        self._keys: Tensor | None = None

    def start(self, micro: MicroBatch, step: int) -> None:
        """Drop elements in the next forward and backward passes, which are of this micro-batch.

        step: number of optimizer steps that are done. Nothing is dropped with probability 0.
        """
        if self.probability:
            assert micro.shard is None, "prefixes need whole rows"
            self._keys = _mix_64(
                prefix_hashes(micro) + seed_of(self._seed, "adapter_dropout", step)
            )

    def stop(self) -> None:
        """Drop nothing any more."""
        self._keys = None

    def drop(self, x: Tensor, name: str, *, first: int = 0, tokens_first: bool = False) -> Tensor:
        """Return x with elements dropped, and the others divided by 1 - probability.

        x: (b, T, in), the input of the layer of this name for the tokens of the micro-batch, or a
        rank's part of its last dimension, from element `first` of the complete input.
        tokens_first: x is (T, b, in).
        """
        keys = self._keys
        if keys is None:
            return x
        if tokens_first:
            keys = keys.T
        layer = seed_of(self._seed, "adapter_layer", name=name)
        elements = torch.arange(first, first + x.shape[-1], device=x.device)
        of_elements = _mix_64(elements + layer).int()  # the low 32 bits
        of_tokens = _mix_64(keys + layer).int()
        hashes = _mix_32(of_tokens[..., None] ^ of_elements)  # (b, T, in)
        bits = (hashes >> (32 - _BITS)) & ((1 << _BITS) - 1)
        is_kept = bits >= int(self.probability * (1 << _BITS))
        return torch.where(is_kept, x / (1 - self.probability), 0.0)


def prefix_hashes(micro: MicroBatch) -> Tensor:
    """Return a hash of the tokens of each token's row up to it: int64, the shape of input_ids.

    Equal for equal prefixes, whatever else is in the micro-batch.
    """
    both = micro.input_ids * _ODD_64[0] + (micro.position_ids + 1) * _ODD_64[1]
    sums = _mix_64(both).cumsum(-1)  # wraps: modulo 2**64
    if micro.packed is None:
        return sums
    return (sums[0] - _before_rows(sums[0], micro.packed))[None]


def _before_rows(sums: Tensor, rows: PackedRows) -> Tensor:
    """Return what each token's running sum (N,) has from other rows: int64 (N,).

    A row that continues a shared prompt keeps the sum of that prompt.
    """
    lengths = torch.tensor(rows.lengths, device=sums.device)
    starts = lengths.cumsum(0) - lengths
    before = torch.where(starts > 0, sums[(starts - 1).clamp(min=0)], 0)
    if rows.seen is not None:
        seen = torch.tensor(rows.seen.lengths, device=sums.device)
        ends = seen.cumsum(0)
        previous = rows.seen.indices[(ends - lengths - 1).clamp(min=0)]
        row_of_token = torch.arange(len(lengths), device=sums.device).repeat_interleave(lengths)
        prompt = sums[previous] - before[row_of_token[previous]]
        before = before - torch.where(seen > lengths, prompt, 0)
    return before.repeat_interleave(lengths)


def _mix_64(x: Tensor) -> Tensor:
    """Return a hash of each int64."""
    for odd in _ODD_64:
        x = (x ^ (x >> 32)) * odd
    return x ^ (x >> 32)


def _mix_32(x: Tensor) -> Tensor:
    """Return a hash of each int32."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _ODD_32[0]
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _ODD_32[1]
    return x ^ ((x >> 16) & 0xFFFF)
