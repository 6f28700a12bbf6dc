"""The tensors of an architecture, by Hugging Face name, in the order of its state dict.

The families share names and order; which rows exist (biases, norms of q and k, the head) follows
from the architecture's flags. A tied lm_head is the embedding and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from spmdflow.weights.architecture import Architecture

EMBEDDING = "model.embed_tokens.weight"
"""The tensor that a tied head shares."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    kind: str
    """embed head norm q k v o gate up down q_norm k_norm score; a bias ends in _bias."""
    layer: int | None
    """Decoder layer, None outside of them."""


@lru_cache(maxsize=64)
def parameters(arch: Architecture) -> tuple[Parameter, ...]:
    """Every tensor of the model once."""
    assert not arch.obstacle, arch.obstacle
    found = []
    for row in _TABLE:
        if row.layered or not row.exists(arch):
            continue
        found.append(Parameter(row.name, _shape(row, arch), row.kind, None))
        if row.kind == "embed":
            found += [part for layer in range(arch.num_layers) for part in _layer(arch, layer)]
    return tuple(found)


@lru_cache(maxsize=64)
def parameters_by_name(arch: Architecture) -> Mapping[str, Parameter]:
    """`parameters` by name; do not write it."""
    return {parameter.name: parameter for parameter in parameters(arch)}


def stage_layers(num_layers: int, *, pp_size: int, pp_rank: int) -> range:
    """Layers of a pipeline stage: neighbours, the first stages one more if they do not divide.

    Stage boundaries are ceil(stage * num_layers / pp_size). So the stages of a pp_size lie whole
    inside those of its divisors, and for two stages vLLM divides the same way by itself; for more
    uneven ones it is told by VLLM_PP_LAYER_PARTITION (the lengths of these ranges).
    """
    assert 0 <= pp_rank < pp_size, (pp_rank, pp_size)
    start, stop = (-(-stage * num_layers // pp_size) for stage in (pp_rank, pp_rank + 1))
    return range(start, stop)


@dataclass(frozen=True)
class _Row:
    name: str
    kind: str
    sizes: tuple[str, ...]
    exists: Callable[[Architecture], bool] = lambda arch: True

    @property
    def layered(self) -> bool:
        return "{layer}" in self.name


_TABLE = (
    _Row(EMBEDDING, "embed", ("vocab", "hidden")),
    _Row("model.layers.{layer}.self_attn.q_proj.weight", "q", ("q", "hidden")),
    _Row("model.layers.{layer}.self_attn.q_proj.bias", "q_bias", ("q",), lambda a: a.qkv_bias),
    _Row("model.layers.{layer}.self_attn.k_proj.weight", "k", ("kv", "hidden")),
    _Row("model.layers.{layer}.self_attn.k_proj.bias", "k_bias", ("kv",), lambda a: a.qkv_bias),
    _Row("model.layers.{layer}.self_attn.v_proj.weight", "v", ("kv", "hidden")),
    _Row("model.layers.{layer}.self_attn.v_proj.bias", "v_bias", ("kv",), lambda a: a.qkv_bias),
    _Row("model.layers.{layer}.self_attn.o_proj.weight", "o", ("hidden", "q")),
    _Row("model.layers.{layer}.self_attn.o_proj.bias", "o_bias", ("hidden",), lambda a: a.o_bias),
    _Row("model.layers.{layer}.self_attn.q_norm.weight", "q_norm", ("head",), lambda a: a.qk_norm),
    _Row("model.layers.{layer}.self_attn.k_norm.weight", "k_norm", ("head",), lambda a: a.qk_norm),
    _Row("model.layers.{layer}.mlp.gate_proj.weight", "gate", ("ffn", "hidden")),
    _Row("model.layers.{layer}.mlp.gate_proj.bias", "gate_bias", ("ffn",), lambda a: a.mlp_bias),
    _Row("model.layers.{layer}.mlp.up_proj.weight", "up", ("ffn", "hidden")),
    _Row("model.layers.{layer}.mlp.up_proj.bias", "up_bias", ("ffn",), lambda a: a.mlp_bias),
    _Row("model.layers.{layer}.mlp.down_proj.weight", "down", ("hidden", "ffn")),
    _Row("model.layers.{layer}.mlp.down_proj.bias", "down_bias", ("hidden",), lambda a: a.mlp_bias),
    _Row("model.layers.{layer}.input_layernorm.weight", "norm", ("hidden",)),
    _Row("model.layers.{layer}.post_attention_layernorm.weight", "norm", ("hidden",)),
    _Row("model.norm.weight", "norm", ("hidden",)),
    _Row(
        "lm_head.weight",
        "head",
        ("vocab", "hidden"),
        lambda a: a.head == "causal_lm" and not a.tied,
    ),
    _Row("score.weight", "score", ("one", "hidden"), lambda a: a.head == "scalar"),
)


def _layer(arch: Architecture, layer: int) -> list[Parameter]:
    rows = [row for row in _TABLE if row.layered and row.exists(arch)]
    return [
        Parameter(row.name.format(layer=layer), _shape(row, arch), row.kind, layer) for row in rows
    ]


def _shape(row: _Row, arch: Architecture) -> tuple[int, ...]:
    sizes = {
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "ffn": arch.ffn_size,
        "q": arch.num_heads * arch.head_dim,
        "kv": arch.num_kv_heads * arch.head_dim,
        "head": arch.head_dim,
        "one": 1,
    }
    return tuple(sizes[size] for size in row.sizes)
