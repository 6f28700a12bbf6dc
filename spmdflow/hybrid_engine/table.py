"""Which boxes each rank trains with and generates with, by the names that settings use."""

from __future__ import annotations

from spmdflow.kind.engine import engine_kind
from spmdflow.kind.generator import generator_kind
from spmdflow.kind.registry import load
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import RankTables, buffer_places, megatron_tables


def training_tables(architecture: Architecture, layout: Layout, *, kind: str) -> RankTables:
    """What each rank trains with, by engine.kind."""
    tables: RankTables = load(engine_kind(kind).weight_table)(architecture, layout)
    return tables


def generation_tables(architecture: Architecture, layout: Layout, *, engine: str) -> RankTables:
    """What each rank generates with, by rollout.engine and the layout's generation sizes."""
    tables: RankTables = load(generator_kind(engine).weight_table)(architecture, layout)
    return tables


def storage_numel(
    architecture: Architecture, layout: Layout, *, distributed_optimizer: bool
) -> dict[int, int]:
    """Elements of each rank's Megatron parameter buffer, padded for that optimizer if it is on."""
    aligned_over = layout.dp_size if distributed_optimizer else None
    shared = architecture.tied and layout.pp_size > 1
    return {
        rank: buffer_places(table, aligned_over=aligned_over, shared_embedding=shared)[1]
        for rank, table in megatron_tables(architecture, layout).items()
    }
