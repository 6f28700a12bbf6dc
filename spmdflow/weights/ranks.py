"""Shard tables of all ranks of a layout, engine by engine. Integers only.

Ranks that hold the same share one table object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

from spmdflow.blocks.box import Box
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.cut import ShardTable, rows_of, stack
from spmdflow.weights.megatron import megatron_shards
from spmdflow.weights.megatron import vocab_multiple as multiple_of
from spmdflow.weights.table import parameters
from spmdflow.weights.vllm import vllm_shards

_Place = TypeVar("_Place", bound=Hashable)
RankTables = Mapping[int, ShardTable]
"""By global rank."""
BUCKET_BYTES = 64 << 20
"""Bytes of weights that one rank packs, and that reach it, at a time between two layouts."""


def megatron_tables(
    arch: Architecture, layout: Layout, *, vocab_multiple: int | None = None
) -> RankTables:
    """What each rank trains with under Megatron, its vocabulary padded to a multiple."""
    multiple = vocab_multiple or multiple_of(layout.tp_size)

    def table(place: tuple[int, int]) -> ShardTable:
        pp_rank, tp_rank = place
        return megatron_shards(
            arch,
            tp_size=layout.tp_size,
            tp_rank=tp_rank,
            pp_size=layout.pp_size,
            pp_rank=pp_rank,
            vocab_multiple=multiple,
        )

    places = {rank: layout.coordinate(rank) for rank in layout.ranks}
    return _shared({rank: (place.pp, place.tp) for rank, place in places.items()}, table)


def sharded_tables(arch: Architecture, layout: Layout) -> RankTables:
    """What each rank trains with under FSDP or ZeRO: rows of shard_size; whole tensors if 1."""
    shard_size = layout.shard_size
    if shard_size == 1:
        return whole_tables(arch, layout)
    return _shared(
        {rank: layout.coordinate(rank).dp % shard_size for rank in layout.ranks},
        lambda place: fsdp_shards(arch, shard_size=shard_size, shard_rank=place),
    )


def row_tables(arch: Architecture, layout: Layout) -> RankTables:
    """What each rank trains with where all data-parallel ranks divide every tensor's rows."""
    return sharded_tables(arch, replace(layout, shard_size=layout.dp_size))


def whole_tables(arch: Architecture, layout: Layout) -> RankTables:
    """Every tensor on every rank: the built-in generator."""
    return _shared(dict.fromkeys(layout.ranks, 0), lambda place: whole_shards(arch))


def vllm_tables(arch: Architecture, layout: Layout) -> RankTables:
    """What each rank generates with under vLLM, by the layout's generation sizes."""

    def table(place: tuple[int, int]) -> ShardTable:
        pp_rank, tp_rank = place
        return vllm_shards(
            arch,
            tp_size=layout.gen_tp_size,
            tp_rank=tp_rank,
            pp_size=layout.gen_pp_size,
            pp_rank=pp_rank,
        )

    places = {rank: layout.generation_coordinate(rank) for rank in layout.ranks}
    return _shared({rank: (place.pp, place.tp) for rank, place in places.items()}, table)


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


def _shared(places: Mapping[int, _Place], table: Callable[[_Place], ShardTable]) -> RankTables:
    made = {place: table(place) for place in dict.fromkeys(places.values())}
    return {rank: made[place] for rank, place in places.items()}
