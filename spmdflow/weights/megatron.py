"""Weights as megatron-core 0.16 to 0.19 holds them (its local layer specification). Integers only.

- linear_qkv: per key-value group its query heads, its key head, its value head, the groups one
  beneath another; the rows are cut in t equal parts. With fewer kv heads than t a cut falls inside
  a group, or inside a head: nothing is replicated, Megatron gathers the *activations* over tp.
- linear_fc1: this rank's rows of gate, then those of up.
- linear_proj, linear_fc2: columns; their biases whole on every rank.
- Embedding and output layer: rows of the vocabulary, padded to `vocab_multiple`.
- Layers over stages: `table.stage_layers`, numbered from 0 in each stage. The last stage of a tied
  model has a copy of the embedding as its output layer if there is more than one stage.
- A scalar head is the output layer: one row, whole on every rank of the last stage.
"""

from __future__ import annotations

import math

from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_names
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.cut import Cut, LayerRow, LocalTensor, ShardTable, check_sizes
from spmdflow.weights.table import EMBEDDING, stage_layers

SHARED_EMBEDDING = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Of a tied model over several stages: the first stage's, and the last stage's copy."""

_QKV = ("self_attn.q_proj.{}", "self_attn.k_proj.{}", "self_attn.v_proj.{}")
_GATE_UP = ("mlp.gate_proj.{}", "mlp.up_proj.{}")


def _each(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(name.format(kind) for name in names)


_LAYER: tuple[LayerRow, ...] = (
    ("input_layernorm.weight", Cut.whole, ("input_layernorm.weight",)),
    ("self_attention.linear_proj.weight", Cut.columns, ("self_attn.o_proj.weight",)),
    ("self_attention.linear_proj.bias", Cut.whole, ("self_attn.o_proj.bias",)),
    ("self_attention.linear_qkv.weight", Cut.groups, _each(_QKV, "weight")),
    ("self_attention.linear_qkv.bias", Cut.groups, _each(_QKV, "bias")),
    ("self_attention.q_layernorm.weight", Cut.whole, ("self_attn.q_norm.weight",)),
    ("self_attention.k_layernorm.weight", Cut.whole, ("self_attn.k_norm.weight",)),
    ("pre_mlp_layernorm.weight", Cut.whole, ("post_attention_layernorm.weight",)),
    ("mlp.linear_fc1.weight", Cut.rows, _each(_GATE_UP, "weight")),
    ("mlp.linear_fc1.bias", Cut.rows, _each(_GATE_UP, "bias")),
    ("mlp.linear_fc2.weight", Cut.columns, ("mlp.down_proj.weight",)),
    ("mlp.linear_fc2.bias", Cut.whole, ("mlp.down_proj.bias",)),
)


def megatron_shards(
    arch: Architecture,
    *,
    tp_size: int,
    tp_rank: int,
    pp_size: int,
    pp_rank: int,
    vocab_multiple: int,
) -> ShardTable:
    """Local tensors of one rank, by the parameter names of `GPTModel`.

    vocab_multiple: the vocabulary is padded to a multiple of it; tp_size divides that.
    ConfigError if the architecture cannot be cut so, or has biases that Megatron has not.
    """
    check_sizes("megatron", arch, tp_size=tp_size, pp_size=pp_size)
    _check_biases(arch)
    cut = Cut("megatron", arch, tp_size, tp_rank, vocab_multiple)
    table: dict[str, LocalTensor] = {}
    if pp_rank == 0:
        table["embedding.word_embeddings.weight"] = cut.vocabulary([EMBEDDING])
    for number, layer in enumerate(stage_layers(arch.num_layers, pp_size=pp_size, pp_rank=pp_rank)):
        for name, tensor in cut.layer(_LAYER, layer):
            table[f"decoder.layers.{number}.{name}"] = tensor
    if pp_rank == pp_size - 1:
        table["decoder.final_layernorm.weight"] = cut.whole(["model.norm.weight"])
        if arch.head == "scalar":
            table["output_layer.weight"] = cut.whole(["score.weight"])
        elif not arch.tied:
            table["output_layer.weight"] = cut.vocabulary(["lm_head.weight"])
        elif pp_size > 1:
            table["output_layer.weight"] = cut.vocabulary([EMBEDDING])
    return table


def vocab_multiple(tp_size: int) -> int:
    """What the vocabulary is padded to: rows divide over tp, and vLLM pads to 64."""
    return math.lcm(64, tp_size)


def buffer_numel(table: ShardTable, *, aligned_over: int | None, shared_embedding: bool) -> int:
    """Elements of the flat buffer of `buffer_places`."""
    return buffer_places(table, aligned_over=aligned_over, shared_embedding=shared_embedding)[1]


def buffer_places(
    table: ShardTable, *, aligned_over: int | None, shared_embedding: bool
) -> tuple[dict[str, int], int]:
    """Where the flat buffer in which Megatron's DDP lays a rank's parameters (one bucket) has each,
    and its elements.

    aligned_over: dp_size under the distributed optimizer, which begins each parameter at a
    multiple of 64 and ends each bucket at one of lcm(dp_size, 128); None without it: no padding.
    shared_embedding: tied over several stages, the embedding (or its copy) has a bucket of its own.
    """
    places: dict[str, int] = {}
    end, is_open = 0, False
    if aligned_over is None:
        for name, tensor in table.items():
            places[name], end = end, end + tensor.size
        return places, end
    alignment = math.lcm(aligned_over, 128)
    for name in reversed(list(table)):
        start = _rounded_up(end, 64)
        alone = shared_embedding and name in SHARED_EMBEDDING
        if alone and is_open:
            start = _rounded_up(start, alignment)
        places[name] = start
        end, is_open = start + table[name].size, not alone
        if alone:
            end = _rounded_up(end, alignment)
    return places, _rounded_up(end, alignment)


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check_biases(arch: Architecture) -> None:
    if arch.o_bias != arch.mlp_bias or (arch.mlp_bias and not arch.qkv_bias):
        raise ConfigError(
            f"megatron: got biases qkv {arch.qkv_bias}, o {arch.o_bias}, mlp {arch.mlp_bias}, "
            f"expected all, none or qkv alone, as Megatron has one switch for o and mlp; choose "
            f"another model or engine.kind={engine_names()[0]}"
        )
