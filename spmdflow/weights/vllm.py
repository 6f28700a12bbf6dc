"""Weights as vLLM 0.32 holds them, by its parameter names. Integers only; vLLM is not imported.

- qkv_proj: this rank's query heads, then its key heads, then its value heads. With fewer kv heads
  than t each is held by t / num_kv_heads neighbours.
- gate_up_proj: this rank's rows of gate, then those of up; o_proj and down_proj: columns.
- embed_tokens and lm_head: rows of the vocabulary padded to a multiple of 64.
- Layers keep their number; stages as `table.stage_layers`. A tied model has the embedding on the
  first and on the last stage, and no lm_head of its own.
"""

from __future__ import annotations

from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_names
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.cut import Cut, LayerRow, LocalTensor, ShardTable, Way, check_sizes
from spmdflow.weights.table import EMBEDDING, stage_layers

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this, whatever the tensor-parallel size."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def _same(way: Way, *names: str) -> tuple[LayerRow, ...]:
    """Rows of tensors that keep their Hugging Face name."""
    return tuple((name, way, (name,)) for name in names)


_LAYER: tuple[LayerRow, ...] = (
    ("self_attn.qkv_proj.weight", Cut.heads, tuple(f"{name}.weight" for name in _QKV)),
    ("self_attn.qkv_proj.bias", Cut.heads, tuple(f"{name}.bias" for name in _QKV)),
    *_same(Cut.columns, "self_attn.o_proj.weight"),
    *_same(Cut.whole, "self_attn.o_proj.bias", "self_attn.q_norm.weight"),
    *_same(Cut.whole, "self_attn.k_norm.weight"),
    ("mlp.gate_up_proj.weight", Cut.rows, tuple(f"{name}.weight" for name in _GATE_UP)),
    ("mlp.gate_up_proj.bias", Cut.rows, tuple(f"{name}.bias" for name in _GATE_UP)),
    *_same(Cut.columns, "mlp.down_proj.weight"),
    *_same(Cut.whole, "mlp.down_proj.bias"),
    *_same(Cut.whole, "input_layernorm.weight", "post_attention_layernorm.weight"),
)


def vllm_shards(
    arch: Architecture, *, tp_size: int, tp_rank: int, pp_size: int, pp_rank: int
) -> ShardTable:
    """Local tensors of one rank; ConfigError if vLLM cannot hold the architecture so."""
    _check(arch)
    check_sizes("vllm", arch, tp_size=tp_size, pp_size=pp_size)
    cut = Cut("vllm", arch, tp_size, tp_rank, VOCAB_MULTIPLE)
    first, last = pp_rank == 0, pp_rank == pp_size - 1
    table: dict[str, LocalTensor] = {}
    if first or (last and arch.tied):
        table[EMBEDDING] = cut.vocabulary([EMBEDDING])
    for layer in stage_layers(arch.num_layers, pp_size=pp_size, pp_rank=pp_rank):
        for name, tensor in cut.layer(_LAYER, layer):
            table[f"model.layers.{layer}.{name}"] = tensor
    if last:
        table["model.norm.weight"] = cut.whole(["model.norm.weight"])
        if not arch.tied:
            table["lm_head.weight"] = cut.vocabulary(["lm_head.weight"])
    return table


def _check(arch: Architecture) -> None:
    if arch.head != "causal_lm":
        raise ConfigError(
            "vllm: got a model with a scalar head, expected one that generates; "
            "give rollout a causal language model"
        )
    if arch.family == "qwen3" and arch.o_bias:
        raise ConfigError(
            "vllm: got a qwen3 model with attention_bias, expected none, as vLLM's Qwen3 has no "
            f"bias on o_proj; set "
            f"actor.rollout.engine={generator_names()[0]} or choose another model"
        )
