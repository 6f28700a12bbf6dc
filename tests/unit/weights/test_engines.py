"""Shard tables against what megatron-core and vLLM do with the tensors."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from spmdflow.weights.move import fill
from spmdflow.weights.ranks import megatron_shards, vllm_shards
from tests.unit.weight_shapes import architecture, empty_of, reader_of, values_of


class _Given(torch.nn.Module):
    """A linear layer whose output is known."""

    def __init__(self, output):
        super().__init__()
        self._output = output

    def forward(self, hidden):
        return self._output, None


LAYER = "model.layers.0.self_attn."
LAYOUTS = [(kv_heads, tp_size) for kv_heads in (1, 2, 4, 8) for tp_size in (1, 2, 4)]


def _filled(arch, shards, tp_size, **extra):
    values = values_of(arch)
    found = []
    for tp_rank in range(tp_size):
        table = shards(arch, tp_size=tp_size, tp_rank=tp_rank, pp_size=1, pp_rank=0, **extra)
        found.append(empty_of(table))
        fill(found[-1], table, reader_of(values))
    return values, found


@pytest.mark.parametrize(("kv_heads", "tp_size"), LAYOUTS)
def test_megatron_reads_each_ranks_query_and_kv_heads_from_its_qkv(kv_heads, tp_size):
    from megatron.core.transformer import attention

    arch = architecture("qwen2, two kv heads", num_key_value_heads=kv_heads)
    values, local = _filled(arch, megatron_shards, tp_size, vocab_multiple=64)
    x = torch.randint(-3, 3, (3, 1, arch.hidden_size)).double()  # (s, b, h)
    name = "decoder.layers.0.self_attention.linear_qkv."
    mixed = [x @ rank[name + "weight"].T + rank[name + "bias"] for rank in local]
    whole = {
        part: (
            x @ values[f"{LAYER}{part}_proj.weight"].T + values[f"{LAYER}{part}_proj.bias"]
        ).unflatten(-1, (-1, arch.head_dim))
        for part in "qkv"
    }
    for rank in range(tp_size):
        few = kv_heads < tp_size
        layer = SimpleNamespace(
            config=SimpleNamespace(num_query_groups=kv_heads, test_mode=False),
            world_size=tp_size,
            linear_qkv=_Given(mixed[rank]),
            num_attention_heads_per_partition=8 // (kv_heads if few else tp_size),
            num_query_groups_per_partition=1 if few else kv_heads // tp_size,
            hidden_size_per_attention_head=arch.head_dim,
            q_layernorm=None,
            k_layernorm=None,
            pg_collection=SimpleNamespace(tp=None),  # what 0.19 asks in place of its global group
        )

        def this_rank(group=None, rank=rank):
            return rank

        with (
            mock.patch.object(
                attention,
                "all_gather_last_dim_from_tensor_parallel_region",
                lambda part, group=None: torch.cat(mixed, -1),
            ),
            mock.patch.object(attention, "get_tensor_model_parallel_rank", this_rank),
            mock.patch.object(attention, "get_pg_rank", this_rank, create=True),
        ):
            query, key, value = attention.SelfAttention.get_query_key_value_tensors(layer, x)

        heads = 8 // tp_size
        first = rank * kv_heads // tp_size
        groups = slice(first, first + max(1, kv_heads // tp_size))
        assert torch.equal(query, whole["q"][:, :, rank * heads : (rank + 1) * heads])
        assert torch.equal(key, whole["k"][:, :, groups])
        assert torch.equal(value, whole["v"][:, :, groups])


@pytest.mark.parametrize(("kv_heads", "tp_size"), LAYOUTS)
def test_vllm_loads_the_same_shards_from_whole_tensors(kv_heads, tp_size):
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    arch = architecture("qwen2, two kv heads", num_key_value_heads=kv_heads)
    values, local = _filled(arch, vllm_shards, tp_size)
    for rank in range(tp_size):
        group = SimpleNamespace(world_size=tp_size, rank_in_group=rank)
        with mock.patch.object(parallel_state, "_TP", group), set_current_vllm_config(VllmConfig()):
            layers = _vllm_layers(arch, linear, vocab_parallel_embedding)
            for layer, parts in layers.values():
                for part, suffix in parts:
                    for kind in ("weight", "bias"):
                        if f"{suffix}.{kind}" in values:
                            parameter = getattr(layer, kind)
                            arguments = (part,) if part is not None else ()
                            parameter.weight_loader(
                                parameter, values[f"{suffix}.{kind}"], *arguments
                            )
        for name, (layer, _) in layers.items():
            for kind, parameter in layer.named_parameters():
                assert torch.equal(parameter.double(), local[rank][f"{name}.{kind}"]), name


def _vllm_layers(arch, linear, vocab):
    """vLLM's layer by its name, with the (shard id, Hugging Face name) of what it loads."""
    hidden = arch.hidden_size
    mlp = "model.layers.0.mlp."
    width = arch.num_heads * arch.head_dim
    double = {"params_dtype": torch.float64}
    layers = {
        LAYER + "qkv_proj": (
            linear.QKVParallelLinear(hidden, arch.head_dim, 8, arch.num_kv_heads, **double),
            [(part, f"{LAYER}{part}_proj") for part in "qkv"],
        ),
        mlp + "gate_up_proj": (
            linear.MergedColumnParallelLinear(hidden, [arch.ffn_size] * 2, bias=False, **double),
            [(0, mlp + "gate_proj"), (1, mlp + "up_proj")],
        ),
        LAYER + "o_proj": (
            linear.RowParallelLinear(width, hidden, bias=False, **double),
            [(None, LAYER + "o_proj")],
        ),
        mlp + "down_proj": (
            linear.RowParallelLinear(arch.ffn_size, hidden, bias=False, **double),
            [(None, mlp + "down_proj")],
        ),
        "model.embed_tokens": (
            vocab.VocabParallelEmbedding(arch.vocab_size, hidden, **double),
            [(None, "model.embed_tokens")],
        ),
        "lm_head": (
            vocab.ParallelLMHead(arch.vocab_size, hidden, **double),
            [(None, "lm_head")],
        ),
    }
    return layers
