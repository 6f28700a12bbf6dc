"""An additive hash of a tensor's bits and their places. Knows no ranks and no names.

The hash of a tensor is the sum over its elements of mix(bits, flat index) modulo 2**64. Because
it adds up, ranks hash the pieces they hold and sum: the result does not depend on how the tensor
is cut, and a moved, lost, repeated or altered element changes it (with probability 1 - 2**-64
for a single element). The mixer is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from spmdflow.blocks.box import Box

Key = TypeVar("Key", bound=Hashable)
MODULUS = 2**64
_CHUNK = 1 << 20
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def positional_hash(values: Tensor, offset: int) -> int:
    """Hash in [0, 2**64) of a piece whose first element has flat index offset in the whole.

    values: any shape and dtype, contiguous in the whole tensor's flat (row-major) order.
    hash(whole) = sum of hash(piece) modulo 2**64. Waits for the device.
    """
    return int(positional_sum(values, offset)) % MODULUS


def box_hash(values: Tensor, box: Box, shape: Sequence[int]) -> int:
    """As `positional_hash`, of the elements `box` of a tensor of that shape; see `box_sum`."""
    return int(box_sum(values, box, shape)) % MODULUS


def read_sums(sums: Mapping[Key, Tensor]) -> dict[Key, int]:
    """The hashes in [0, 2**64) that sums on one device stand for: one wait for all of them."""
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return {key: value % MODULUS for key, value in zip(sums, values, strict=True)}


def positional_sum(values: Tensor, offset: int) -> Tensor:
    """`positional_hash` as an int64 scalar on the device of values; int64 wraps at 2**64."""
    flat = values.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        first = offset + start
        total += _hash_elements(part, torch.arange(first, first + len(part), device=values.device))
    return total


def box_sum(values: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """Hash of the elements `box` of a tensor of that shape, as an int64 scalar on their device.

    values: of the box's shape, any dtype and strides. Over disjoint boxes that cover the tensor
    the hashes add up, modulo 2**64, to the whole tensor's `positional_hash(tensor, 0)`.
    """
    assert tuple(values.shape) == box.shape, f"values {tuple(values.shape)} for box {box.shape}"
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = sum(low * stride for (low, _), stride in zip(box.bounds, strides, strict=True))
    if box.shape[1:] == tuple(shape[1:]):
        return positional_sum(values, offset)
    inner = torch.zeros((), dtype=torch.int64, device=values.device)
    for size, stride in zip(box.shape[1:], strides[1:], strict=True):
        inner = inner[..., None] + torch.arange(size, device=values.device) * stride
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, _CHUNK // max(1, inner.numel()))
    for start in range(0, box.shape[0], rows):
        part = values.detach()[start : start + rows]
        first = torch.arange(start, start + len(part), device=values.device) * strides[0]
        index = first.view(-1, *[1] * inner.ndim) + inner + offset
        total += _hash_elements(part.reshape(-1), index.view(-1))
    return total


def to_signed(value: int) -> int:
    """The int64 with the same bits, so that hashes can be summed in a tensor."""
    return value - MODULUS if value >= MODULUS // 2 else value


def _hash_elements(flat: Tensor, index: Tensor) -> Tensor:
    """Sum of mixed elements; int64 arithmetic wraps, which is arithmetic modulo 2**64."""
    bits = flat.view(_BITS[flat.element_size()]).to(torch.int64)
    index = index + 1
    # both words are mixed before they meet: (bits, index) pairs cannot trade places
    return _mix(_mix(index * to_signed(_GOLDEN)) ^ bits).sum()


def _mix(word: Tensor) -> Tensor:
    word = (word ^ _shift_right(word, 30)) * to_signed(_FIRST)
    word = (word ^ _shift_right(word, 27)) * to_signed(_SECOND)
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, places: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the sign's copies are masked out."""
    return (word >> places) & ((1 << (64 - places)) - 1)
