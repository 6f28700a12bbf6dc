"""Random architectures and their Hugging Face tensors, for tests of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block, Blocks
from spmdflow.weights.table import ShardTable, parameters

TINY = {
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
VARIANTS = {
    "llama": {"model_type": "llama"},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral, one kv head": {"model_type": "mistral", "num_key_value_heads": 1},
    "qwen2, two kv heads": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3, tied": {"model_type": "qwen3", "tie_word_embeddings": True},
}
SIZES = (1, 2, 4, 8)


def architecture(variant="llama", head="causal_lm", **changes):
    """A tiny architecture of a variant, with changes to its config."""
    return Architecture.from_config({**TINY, **VARIANTS[variant], **changes}, head=head)


def family_architecture(family: str, facts: Mapping[str, Any]) -> Architecture:
    """The sizes of a model of any family, with the tensors of transformers' module."""
    config = transformers.AutoConfig.for_model(family, **facts)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    tensors = [(name, tuple(each.shape)) for name, each in module.named_parameters()]
    arch = Architecture.sizes_from_config(config.to_dict())
    return replace(arch, obstacle="tensors of transformers", tensors=tuple(tensors))


def values_of(arch):
    """Whole tensors by Hugging Face name; every element differs from every other."""
    start = 1
    found = {}
    for parameter in parameters(arch):
        size = torch.Size(parameter.shape).numel()
        found[parameter.name] = torch.arange(start, start + size).view(parameter.shape).double()
        start += size
    return found


def reader_of(values):
    """read(name, box) over whole tensors."""
    return lambda name, box: values[name][box.slices()]


def empty_of(table: ShardTable):
    """Local tensors of a table, filled with -1."""
    return {name: torch.full(tensor.shape, -1.0).double() for name, tensor in table.items()}


def count(table: ShardTable, arch: Architecture):
    """By Hugging Face name: how often a rank holds each element."""
    found = {parameter.name: torch.zeros(parameter.shape) for parameter in parameters(arch)}
    for tensor in table.values():
        for piece in tensor.pieces:
            assert Box.of_shape(tensor.shape).contains(piece.local)
            found[piece.name][piece.box.slices()] += 1
    return found


DENSE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("qwen3_moe", "mixtral")


@st.composite
def architectures(draw, head=None, families=DENSE):
    """Any family with sizes that tp 1, 2, 4 and 8 divide; also fewer kv heads than that."""
    config = {
        "model_type": draw(st.sampled_from(families)),
        "vocab_size": draw(st.integers(1, 300)),
        "hidden_size": draw(st.sampled_from([3, 16])),
        "intermediate_size": 8 * draw(st.integers(1, 3)),
        "num_hidden_layers": draw(st.integers(1, 6)),
        "num_attention_heads": 8 * draw(st.integers(1, 2)),
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4, 8])),
        "head_dim": 2 * draw(st.integers(2, 4)) * 2,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if config["model_type"] in MIXTURES:
        config |= {"num_experts": draw(st.sampled_from([4, 8])), "num_experts_per_tok": 2}
        config["moe_intermediate_size"] = 8 * draw(st.integers(1, 2))
    if config["model_type"] == "llama" and draw(st.booleans()):
        config |= {"attention_bias": True, "mlp_bias": True}
    return Architecture.from_config(
        config, head=head or draw(st.sampled_from(["causal_lm", "scalar"]))
    )


def gathered(
    some: Iterable[Block], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of the names in shapes, in that order; PlanError if an element is missing."""
    reader = Blocks(some)
    for name, shape in shapes.items():
        yield name, reader.read(name, Box.of_shape(shape))
