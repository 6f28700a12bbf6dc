"""Shard tables of all ranks of a layout, engine by engine. Integers only; no engine is imported.

Data-parallel engines: rows in equal chunks, or complete tensors.

Megatron (megatron-core 0.16 to 0.19, its local layer specification):

- linear_qkv: per key-value group its query heads, its key head, its value head, the groups one
  beneath another; the rows are cut in t equal parts. With fewer kv heads than t a cut falls inside
  a group, or inside a head: nothing is replicated, Megatron gathers the *activations* over tp.
- linear_fc1: this rank's rows of gate, then those of up.
- linear_proj, linear_fc2: columns; their complete biases on every rank.
- Experts: the ep ranks of a stage have equal parts of them, one after another; inside an expert the
  tensors are cut over tp like those of a dense layer. The router's matrix is on every rank.
- Embedding and output layer: rows of the vocabulary, padded to `vocab_multiple`.
- Layers over stages: `table.stage_layers`, numbered from 0 in each stage. The last stage of a tied
  model has a copy of the embedding as its output layer if there is more than one stage.
- A scalar head is the output layer: one row, on every rank of the last stage.
- Adapters: of a part of a weight, B has the rows and A the columns; see `workers.megatron_lora`.

vLLM, by its parameter names: rows for each family, recorded from vLLM's own loader (`recorded`). In
a run, the loader says again where it puts the weights of mixtures and of families that have no
table of tensors here (`rollout.vllm_derived`). Typical for a dense family:

- qkv_proj: this rank's query heads, then its key heads, then its value heads. With fewer kv heads
  than t each is held by t / num_kv_heads neighbours.
- gate_up_proj: this rank's rows of gate, then those of up; o_proj and down_proj: columns.
- embed_tokens and lm_head: rows of the vocabulary padded to a multiple of 64.
- Layers keep their number; stages as `table.stage_layers`. A tied model has no lm_head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spmdflow.blocks.box import Box, describe_boxes, own_boxes
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_names
from spmdflow.kind.generator import GeneratorKind
from spmdflow.kind.registry import Reference, resolve
from spmdflow.parallel.layout import Layout, divisors
from spmdflow.weights.adapter import Adapters, adapter_names, is_b
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.recorded import rows_of_family
from spmdflow.weights.table import (
    EMBEDDING,
    Cut,
    ExpertWay,
    LayerRow,
    LocalTensor,
    Piece,
    ShardTable,
    check_cut,
    chunk_box,
    parameters,
    stack,
    stage_layers,
)

RankTables = Mapping[int, ShardTable]
"""By global rank. Ranks with the same shards share one table object."""
BUCKET_BYTES = 64 << 20
"""The most bytes of weights that a rank packs or receives at a time between two layouts."""
SHARED_EMBEDDING = ("embedding.word_embeddings.weight", "output_layer.weight")
"""The first stage's embedding and the last stage's copy, in a tied multi-stage Megatron model."""
OVERLAP_BUCKET = 40_000_000
"""Elements at which Megatron closes a bucket of the first stage if it overlaps reductions."""
VLLM_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this, whatever the tensor-parallel size."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def _each(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(f"{name}.{kind}" for name in names)


_MEGATRON_LAYER: tuple[LayerRow, ...] = (
    ("input_layernorm.weight", Cut.full_tensor, ("input_layernorm.weight",)),
    ("self_attention.linear_proj.weight", Cut.columns, ("self_attn.o_proj.weight",)),
    ("self_attention.linear_proj.bias", Cut.full_tensor, ("self_attn.o_proj.bias",)),
    ("self_attention.linear_qkv.weight", Cut.groups, _each(_QKV, "weight")),
    ("self_attention.linear_qkv.bias", Cut.groups, _each(_QKV, "bias")),
    ("self_attention.q_layernorm.weight", Cut.full_tensor, ("self_attn.q_norm.weight",)),
    ("self_attention.k_layernorm.weight", Cut.full_tensor, ("self_attn.k_norm.weight",)),
    ("pre_mlp_layernorm.weight", Cut.full_tensor, ("post_attention_layernorm.weight",)),
    ("mlp.linear_fc1.weight", Cut.rows, _each(_GATE_UP, "weight")),
    ("mlp.linear_fc1.bias", Cut.rows, _each(_GATE_UP, "bias")),
    ("mlp.linear_fc2.weight", Cut.columns, ("mlp.down_proj.weight",)),
    ("mlp.linear_fc2.bias", Cut.full_tensor, ("mlp.down_proj.bias",)),
    ("mlp.router.weight", Cut.full_tensor, ("mlp.gate.weight",)),
)
_MEGATRON_EXPERT: tuple[tuple[str, ExpertWay, str], ...] = (
    ("linear_fc1.weight", Cut.expert_rows, "mlp.experts.gate_up_proj"),
    ("linear_fc2.weight", Cut.expert_columns, "mlp.experts.down_proj"),
)
"""(name below an expert, way, name of the fused tensor below the layer)."""


def tables_of(reference: Reference, architecture: Architecture, layout: Layout) -> RankTables:
    """Return the tables that an engine's or a generator's `weight_table` makes.

    ConfigError for a model without a table, unless that function needs only its shapes
    (`Architecture.tensors`) or has rows for its family.
    """
    make = resolve(reference)
    if architecture.obstacle and make not in (row_tables, whole_tables, vllm_tables):
        raise ConfigError(architecture.obstacle)
    tables: RankTables = make(architecture, layout)
    return tables


def is_derived(kind: GeneratorKind, architecture: Architecture) -> bool:
    """Whether only the generator's own loader knows where it has the architecture's tensors.

    They must have been read if the architecture has no table (`folder.with_tensors`). Of a dense
    model with a table nothing is derived.
    """
    if kind.derived_table is None or architecture.is_dense_with_table:
        return False
    if kind.has_table is None:
        return bool(architecture.obstacle)
    return not resolve(kind.has_table)(architecture)


def row_tables(arch: Architecture, layout: Layout) -> RankTables:
    """Return each rank's shards if shard_size ranks divide the rows of every tensor (FSDP, ZeRO).

    A rank has the shard `Layout.weight_rank` % shard_size; see `row_shards`.
    """
    shard_ranks = {}
    for rank in layout.ranks:
        shard_ranks[rank] = (layout.weight_rank(rank) % layout.shard_size,)

    def table(shard_rank: int) -> ShardTable:
        return row_shards(
            arch,
            shard_size=layout.shard_size,
            shard_rank=shard_rank,
            ep_size=layout.expert_size,
        )

    return _build_tables(shard_ranks, table)


def whole_tables(arch: Architecture, layout: Layout) -> RankTables:
    """Every tensor on every rank, for the built-in generator."""
    return row_tables(arch, replace(layout, shard_size=1, expert_size=1))


def megatron_tables(
    arch: Architecture, layout: Layout, *, vocab_multiple: int | None = None
) -> RankTables:
    """Return each rank's training shards under Megatron, with the vocabulary padded to a multiple.

    vocab_multiple: None means lcm(64, tp_size). With virtual_size v, part c of stage s is stage c p
    + s of a pipeline of p v stages.
    """
    parts = layout.virtual_size
    coordinates = {}
    for rank in layout.ranks:
        coordinate = layout.coordinate(rank)
        ep_rank = layout.weight_rank(rank) % layout.expert_size
        coordinates[rank] = (coordinate.tp, coordinate.pp, ep_rank)

    def table(tp_rank: int, pp_rank: int, ep_rank: int) -> ShardTable:
        """Return the local tensors of a rank, part after part of the model.

        With several parts, names begin with the number of the part (`part_name`).
        """
        result = {}
        for part in range(parts):
            for name, tensor in megatron_shards(
                arch,
                tp_size=layout.tp_size,
                tp_rank=tp_rank,
                pp_size=layout.pp_size * parts,
                pp_rank=part * layout.pp_size + pp_rank,
                ep_size=layout.expert_size,
                ep_rank=ep_rank,
                vocab_multiple=vocab_multiple or default_vocab_multiple(layout.tp_size),
            ).items():
                result[part_name(part, name, parts)] = tensor
        return result

    return _build_tables(coordinates, table)


def counted_boxes(tables: Sequence[ShardTable], index: int) -> list[list[Box]]:
    """Return the boxes of each piece of a rank's table that this rank counts.

    Norms, small biases and a tied copy are on several ranks, and count once. tables: of the ranks
    that together have one copy. index: of the rank among them.
    """
    boxes_of_ranks = []
    for table in tables:
        pieces = (piece for tensor in table.values() for piece in tensor.pieces)
        boxes_of_ranks.append(describe_boxes((piece.name, piece.box) for piece in pieces))
    return own_boxes(boxes_of_ranks, index)


def part_name(part: int, name: str, num_parts: int) -> str:
    """Name of a parameter in one of the parts of the model on a rank."""
    if num_parts == 1:
        return name
    return f"{part}.{name}"


def vllm_tables(arch: Architecture, layout: Layout) -> RankTables:
    """Each rank's shards under vLLM, by the layout's generation sizes."""

    def table(tp_rank: int, pp_rank: int) -> ShardTable:
        return vllm_shards(
            arch,
            tp_size=layout.gen_tp_size,
            tp_rank=tp_rank,
            pp_size=layout.gen_pp_size,
            pp_rank=pp_rank,
            divides_experts=layout.gen_expert_size > 1,
        )

    coordinates = {}
    for rank in layout.ranks:
        coordinate = layout.generation_coordinate(rank)
        coordinates[rank] = (coordinate.tp, coordinate.pp)
    return _build_tables(coordinates, table)


def _build_tables(
    coordinates: Mapping[int, tuple[int, ...]], table: Callable[..., ShardTable]
) -> RankTables:
    """Each rank's table, from its coordinates; ranks with equal coordinates share one table."""
    tables = {}
    for coordinate in dict.fromkeys(coordinates.values()):
        tables[coordinate] = table(*coordinate)
    result = {}
    for rank, coordinate in coordinates.items():
        result[rank] = tables[coordinate]
    return result


def row_shards(
    arch: Architecture, *, shard_size: int, shard_rank: int, ep_size: int = 1
) -> ShardTable:
    """Return FSDP2's shards by Hugging Face name: chunk shard_rank of torch.chunk over dimension 0.

    Chunks have ceil(rows / shard_size) rows, so the last ranks may have fewer rows, or none. With
    divided experts, rank r has a chunk of the experts of part r % ep_size, which shard_size /
    ep_size ranks divide.
    """
    assert 0 <= shard_rank < shard_size, (shard_rank, shard_size)
    table: dict[str, LocalTensor] = {}
    by_shape: dict[tuple[object, ...], LocalTensor] = {}
    for name, shape in parameters(arch):
        parts = ep_size if ".mlp.experts." in name else 1
        key = (parts, *shape)
        if key not in by_shape:
            rows = shape[0] // parts
            part = shard_rank % parts
            box = chunk_box(shape, part * rows, rows, shard_rank // parts, shard_size // parts)
            by_shape[key] = stack([(name, box)])
        first = by_shape[key]
        pieces = tuple(Piece(name, piece.box, piece.local) for piece in first.pieces)
        table[name] = LocalTensor(first.shape, pieces)
    return table


def megatron_shards(
    arch: Architecture,
    *,
    tp_size: int,
    tp_rank: int,
    pp_size: int,
    pp_rank: int,
    vocab_multiple: int,
    ep_size: int = 1,
    ep_rank: int = 0,
) -> ShardTable:
    """Local tensors of one rank, by the parameter names of `GPTModel`.

    vocab_multiple: the vocabulary is padded to a multiple of it; tp_size divides that. ep_size,
    ep_rank: which part of the experts the rank has. ConfigError if the architecture cannot be cut
    this way, or has biases that Megatron lacks.
    """
    check_cut("megatron", arch, tp_size=tp_size, pp_size=pp_size)
    if arch.num_experts % ep_size:
        got = f"{arch.num_experts} experts over {ep_size} ranks"
        do = f"choose one of {divisors(arch.num_experts)}"
        raise ConfigError.of("megatron", got, "equal parts", do)
    if arch.o_bias != arch.mlp_bias or (arch.mlp_bias and not arch.qkv_bias):
        got = f"biases qkv {arch.qkv_bias}, o {arch.o_bias}, mlp {arch.mlp_bias}"
        expected = "all, none or qkv alone, as Megatron has one switch for o and mlp"
        do = f"choose another model or engine.kind={engine_names()[0]}"
        raise ConfigError.of("megatron", got, expected, do)
    cut = Cut("megatron", arch, tp_size, tp_rank, vocab_multiple)
    table: dict[str, LocalTensor] = {}
    if pp_rank == 0:
        table["embedding.word_embeddings.weight"] = cut.vocabulary([EMBEDDING])
    for number, layer in enumerate(stage_layers(arch.num_layers, pp_size=pp_size, pp_rank=pp_rank)):
        for name, tensor in cut.layer(_MEGATRON_LAYER, layer):
            table[f"decoder.layers.{number}.{name}"] = tensor
        num_local = arch.num_experts // ep_size
        for expert in range(num_local):
            for name, way, suffix in _MEGATRON_EXPERT:
                fused = f"model.layers.{layer}.{suffix}"
                local = f"decoder.layers.{number}.mlp.experts.local_experts.{expert}.{name}"
                table[local] = way(cut, fused, ep_rank * num_local + expert)
    if pp_rank == pp_size - 1:
        table["decoder.final_layernorm.weight"] = cut.full_tensor(["model.norm.weight"])
        if arch.head == "scalar":
            table["output_layer.weight"] = cut.full_tensor(["score.weight"])
        elif not arch.tied:
            table["output_layer.weight"] = cut.vocabulary(["lm_head.weight"])
        elif pp_size > 1:
            table["output_layer.weight"] = cut.vocabulary([EMBEDDING])
    if arch.adapters is not None:
        table |= _megatron_adapters(table, arch.adapters)
    return table


def _megatron_adapters(table: ShardTable, adapters: Adapters) -> dict[str, LocalTensor]:
    """Return the local As and Bs of a rank's weights, by `adapter_local_name`.

    B has the rows of the rank's part of the weight in the order in which that has them, A has its
    columns.
    """
    boxes: dict[str, list[tuple[str, Box]]] = {}
    for name, tensor in table.items():
        layer = name.removesuffix(".weight")
        for piece in tensor.pieces:
            for adapter, box in adapter_boxes(piece, adapters).items():
                parts = boxes.setdefault(adapter_local_name(layer, adapter), [])
                if is_b(adapter) or not parts:  # all pieces of a weight have the same columns
                    parts.append((adapter, box))
    return {name: stack(parts) for name, parts in boxes.items()}


def adapter_local_name(layer: str, adapter: str) -> str:
    """Name of an A or a B in a Megatron model.

    layer: the name of the Megatron layer. adapter: the Hugging Face name of the A or B.
    """
    _, part, matrix, _ = adapter.rsplit(".", 3)  # x.q_proj.lora_A.weight
    return f"{layer}.adapters.{part}.{matrix}"


def default_vocab_multiple(tp_size: int) -> int:
    """Multiple to which Megatron's vocabulary is padded, so that tp and vLLM's 64 divide it."""
    return math.lcm(VLLM_VOCAB_MULTIPLE, tp_size)


def buffer_offsets(
    table: ShardTable,
    *,
    aligned_over: int | None,
    shared_embedding: bool,
    bucket_size: int | None = None,
) -> tuple[dict[str, int], int]:
    """Return each parameter's offset in the flat buffer of Megatron's DDP, and the buffer's size.

    Both are in elements. aligned_over: dp * cp under the distributed optimizer. Parameters then
    follow in reverse order of the table, each starts at a multiple of 64, and each bucket ends at a
    multiple of lcm(dp * cp, 128). None, without it: in order of the table, no padding. A bucket
    ends once it has bucket_size elements; None: there is one bucket. shared_embedding: the
    embedding (or its copy), tied over several stages, has a separate bucket.
    """
    offsets: dict[str, int] = {}
    first = 0
    end = 0
    is_open = False
    if aligned_over is None:
        for name, tensor in table.items():
            offsets[name] = end
            end = end + tensor.size
        return offsets, end
    alignment = math.lcm(aligned_over, 128)
    for name in reversed(list(table)):
        start = _round_up(end, 64)
        is_separate = shared_embedding and name in SHARED_EMBEDDING
        if is_separate and is_open:
            start = first = _round_up(start, alignment)
        offsets[name] = start
        end = start + table[name].size
        is_open = not is_separate and (bucket_size is None or end - first < bucket_size)
        if not is_open:
            end = first = _round_up(end, alignment)
    return offsets, _round_up(end, alignment)


def storage_numel(
    arch: Architecture, layout: Layout, *, distributed_optimizer: bool, overlap: bool = False
) -> dict[int, int]:
    """Return the elements of each rank's Megatron parameter buffer, by rank.

    distributed_optimizer: includes its padding. overlap: the first stage closes a bucket at
    OVERLAP_BUCKET elements, which adds padding.
    """
    aligned_over = layout.weight_size if distributed_optimizer else None
    shared = arch.tied and layout.pp_size > 1
    sizes = {}
    for rank, table in megatron_tables(arch, layout).items():
        if overlap and layout.coordinate(rank).pp == 0:
            bucket = OVERLAP_BUCKET
        else:
            bucket = None
        sizes[rank] = buffer_offsets(
            table, aligned_over=aligned_over, shared_embedding=shared, bucket_size=bucket
        )[1]
    return sizes


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def vllm_shards(
    arch: Architecture,
    *,
    tp_size: int,
    tp_rank: int,
    pp_size: int,
    pp_rank: int,
    divides_experts: bool = False,
) -> ShardTable:
    """Return the local tensors of one rank, by vLLM's parameter names and, if any, adapters' names.

    divides_experts: the ranks of tp_size have equal numbers of whole experts (vLLM's expert
    parallelism), not a slice of each.
    ConfigError if vLLM cannot shard the architecture this way, cannot generate with its head, or if
    its family or one of its tensors was not recorded (`recorded.rows_of_family`).
    """
    if arch.head != "causal_lm":
        expected = "one that generates"
        do = "give rollout a causal language model"
        raise ConfigError.of("vllm", "a model with a scalar head", expected, do)
    check_cut("vllm", arch, tp_size=tp_size, pp_size=pp_size)
    cut = Cut("vllm", arch, tp_size, tp_rank, VLLM_VOCAB_MULTIPLE)
    table = rows_of_family(arch).table(
        cut, pp_size=pp_size, pp_rank=pp_rank, divides_experts=divides_experts
    )
    if arch.adapters is not None:
        pieces = []
        for tensor in table.values():
            for piece in tensor.pieces:
                pieces.append(piece)
        boxes = []
        for piece in pieces:
            for x in adapter_boxes(piece, arch.adapters).items():
                boxes.append(x)
        table |= {name: stack([(name, box)]) for name, box in boxes}
    return table


def adapter_boxes(piece: Piece, adapters: Adapters) -> dict[str, Box]:
    """Boxes of A and B that belong to a part of a weight: A has its columns, B its rows.

    Empty for a weight without an adapter.
    """
    boxes = {}
    for name, shape in adapters.shapes({piece.name: piece.box.shape}).items():
        bounds = [(0, size) for size in shape]
        cut = 1 if name == adapter_names(piece.name)[0] else 0
        bounds[cut] = piece.box.bounds[cut]
        boxes[name] = Box(tuple(bounds))
    return boxes
