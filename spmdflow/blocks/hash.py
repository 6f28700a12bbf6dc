"""An additive hash of a tensor's bits and their positions. It does not know ranks or names.

The hash of a tensor is the sum over its elements of weight(position) * (spread(bits) + 1), modulo
2**64. Because it is additive, ranks hash the boxes that they hold and sum the results, which do not
depend on how the tensor is cut. The weight of a position is the product of an odd number per index,
drawn by the finaliser of splitmix64 (Steele, Lea, Flood 2014): rows are summed with one vector of
weights, and their sums with another. This is multilinear hashing (Carter and Wegman 1979).

One altered element always changes the hash, as an odd weight has an inverse. Several altered,
moved, lost or repeated ones go undetected with a probability of at most 2**-32, and 2**-47 if only
the upper or only the lower halves of their bits differ (signs, exponents, the end of a mantissa).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from spmdflow.blocks.box import Box

Key = TypeVar("Key", bound=Hashable)
MODULUS = 2**64
_CPU_CHUNK = 1 << 15
_CHUNK = 1 << 22
"""Elements hashed together: enough to fill a device; on a CPU those that torch leaves to one
thread, because waking a second one for each operation takes longer than the operation."""
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def positional_hash(values: Tensor) -> int:
    """Hash in [0, 2**64) of a complete tensor of any dtype. Waits for the device."""
    return box_hash(values, Box.of_shape(values.shape))


def box_hash(values: Tensor, box: Box) -> int:
    """`box_sum` as a number in [0, 2**64). Waits for the device."""
    return int(box_sum(values, box)) % MODULUS


def read_sums(sums: Mapping[Key, Tensor]) -> dict[Key, int]:
    """Return the hashes in [0, 2**64) of several `box_sum`s on one device, by key.

    Waits for the device once.
    """
    values = torch.stack(list(sums.values())).tolist() if sums else []
    result = {}
    for key, value in zip(sums, values, strict=True):
        result[key] = value % MODULUS
    return result


def box_sum(values: Tensor, box: Box) -> Tensor:
    """Return the hash of the elements `box` of a tensor, as an int64 scalar on their device.

    It is the sum of weight(position) * (spread(bits) + 1), modulo 2**64, where int64 wraps. So the
    hashes of disjoint boxes that cover a tensor add up to the hash of the tensor. Positions are
    those in the complete tensor. values: of the box's shape, any dtype and strides.
    """
    assert tuple(values.shape) == box.shape, f"values {tuple(values.shape)} for box {box.shape}"
    values = values.detach()
    bounds = box.bounds or ((0, 1),)
    if values.element_size() == 8:  # as two elements of four bytes
        values = values.unsqueeze(-1).contiguous().view(torch.int32)
        bounds = (*bounds, (0, 2))
    bits = values.view(_BITS[values.element_size()])
    device = values.device
    *outer, inner = (_weights(dim, *ends, device) for dim, ends in enumerate(bounds))
    rows = torch.ones(1, dtype=torch.int64, device=device)
    for weights in outer:
        rows = (rows[:, None] * weights).view(-1)
    total = rows.sum() * inner.sum()  # of the + 1 of every element
    bits = bits.reshape(len(rows), len(inner))
    height = max(1, (_CPU_CHUNK if device.type == "cpu" else _CHUNK) // max(1, len(inner)))
    for start in range(0, len(rows), height):
        words = bits[start : start + height].to(torch.int64)
        if bits.dtype == torch.int32:
            words += words >> 16  # injective; signs reach the lower half
        total += (rows[start : start + height] * words.mul_(inner).sum(-1)).sum()
    return total


def to_signed(value: int) -> int:
    """Return the int64 with the same bits as an unsigned number below 2**64."""
    if value >= MODULUS // 2:
        return value - MODULUS
    return value


@lru_cache(maxsize=256)
def _weights(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the weights of the indices start .. stop - 1 of a dimension: odd int64 numbers.

    They are the splitmix64 finaliser of index and dimension. Cached: do not write to the result.
    """
    word = torch.arange(start + 1, stop + 1, device=device) * to_signed(_GOLDEN) + dim
    word = (word ^ _shift_right(word, 30)) * to_signed(_FIRST)
    word = (word ^ _shift_right(word, 27)) * to_signed(_SECOND)
    return (word ^ _shift_right(word, 31)) | 1


def _shift_right(word: Tensor, num_bits: int) -> Tensor:
    """Logical shift right. torch shifts int64 arithmetically, so copies of the sign are masked."""
    return (word >> num_bits) & ((1 << (64 - num_bits)) - 1)
