"""Seconds of one forward pass of a decoder layer and of the head on one rank.

Matrices: FLOPs over the rate of large matrices, plus the bytes of both operands and the result over
the memory's rate. The sum of both is compute-bound for many tokens and wide shards, memory-bound
for few tokens (decoding) or narrow shards; no efficiency curve is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spmdflow.mapping.collective import all_reduce
from spmdflow.mapping.machine import Hardware
from spmdflow.mapping.shape import ModelShape
from spmdflow.mapping.strategy import Array


@dataclass(frozen=True)
class Pass:
    """One forward pass: seconds by cause, arrays."""

    compute: Array
    memory: Array
    launch: Array
    """What is missing to the time that the kernels' launches take."""
    tensor_parallel: Array

    @property
    def busy(self) -> Array:
        """Without collectives."""
        return self.compute + self.memory + self.launch

    @property
    def total(self) -> Array:
        """With collectives."""
        return self.busy + self.tensor_parallel


@dataclass(frozen=True)
class Precision:
    """Which rate applies, and bytes of an element."""

    dtype: str
    element_bytes: int


def kv_width(shape: ModelShape, tp: Array) -> Array:
    """Width of a rank's keys: a kv head is not divided, so it repeats where heads < tp."""
    return np.maximum(shape.kv_size / tp, shape.head_dim)


def layer_pass(
    shape: ModelShape, tokens: Array, context: Array, tp: Array, hw: Hardware, how: Precision
) -> Pass:
    """One layer over `tokens` tokens, each attending to `context` others on average."""
    hidden, ffn = shape.hidden_size, shape.ffn_size / tp
    queries, keys = shape.q_size / tp, kv_width(shape, tp)
    matrices = [
        (hidden, queries + 2 * keys),
        (queries, hidden),
        (hidden, (1 + shape.gated) * ffn),
        (ffn, hidden),
    ]
    flops = 4 * tokens * context * queries
    moved = 0.0 * tokens
    for inner, outer in matrices:
        flops = flops + 2 * tokens * inner * outer
        moved = moved + tokens * inner + inner * outer + tokens * outer
    compute = flops / hw.flops(how.dtype)
    memory = moved * how.element_bytes / hw.memory_rate
    launch = np.maximum(hw.layer_floor_seconds - compute - memory, 0)
    size = tokens * hidden * how.element_bytes
    per_node = np.minimum(tp, hw.gpus_per_node)
    return Pass(compute, memory, launch, 2 * all_reduce(size, tp, per_node, hw))


def head_seconds(
    shape: ModelShape, tokens: Array, tp: Array, hw: Hardware, how: Precision
) -> Array:
    """The output layer over `tokens` tokens; a scalar head costs nothing."""
    if shape.scalar_head:
        return 0.0 * (tokens + tp)
    inner, outer = shape.hidden_size, shape.vocab_size / tp
    flops = 2 * tokens * inner * outer / hw.flops(how.dtype)
    moved = tokens * inner + inner * outer + tokens * outer
    return flops + moved * how.element_bytes / hw.memory_rate
