"""Weights of the data-parallel engines and of single-rank generators. Integers only."""

from __future__ import annotations

from spmdflow.blocks.box import Box
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.piece import ShardTable, rows_of, stack
from spmdflow.weights.table import parameters


def fsdp_shards(arch: Architecture, *, shard_size: int, shard_rank: int) -> ShardTable:
    """FSDP2's shards by Hugging Face name: chunk shard_rank of torch.chunk over dimension 0.

    Chunks are rounded up, so the last ranks may have fewer rows, or none.
    """
    assert 0 <= shard_rank < shard_size, (shard_rank, shard_size)
    table = {}
    for parameter in parameters(arch):
        rows = -(-parameter.shape[0] // shard_size)
        box = rows_of(parameter.shape, shard_rank * rows, (shard_rank + 1) * rows)
        table[parameter.name] = stack([(parameter.name, box)])
    return table


def whole_shards(arch: Architecture) -> ShardTable:
    """Every tensor whole: ZeRO 1 and 2 parameters, the built-in generator."""
    return {
        parameter.name: stack([(parameter.name, Box.of_shape(parameter.shape))])
        for parameter in parameters(arch)
    }
