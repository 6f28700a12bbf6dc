"""Masked attention in blocks of queries, because the CPU kernel also computes masked entries.

workers.attention has the attention itself, and the kernels for rows of any length on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MOST_BLOCKS = 4
_MIN_QUERIES = 32
"""A block with fewer queries costs more than its masked entries."""


def attend_in_blocks(
    query: Tensor, num_keys: int, attend: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return causal attention (b, heads, T, d) of query (b, heads, T, d), block by block.

    The queries are at the last T of num_keys positions. They are cut into min(4, T // 32) blocks,
    at least one, of equal size; the last may be smaller.
    attend(block, n): attention of the block's queries, at the last of n positions, over the first n
    keys.
    """
    queries = query.shape[2]
    num_blocks = max(1, min(_MOST_BLOCKS, queries // _MIN_QUERIES))
    size = -(-queries // num_blocks)
    outputs: list[Tensor] = []
    seen = num_keys - queries
    for block in query.split(size, 2):
        seen += block.shape[2]
        outputs.append(attend(block, seen))
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs, 2)
