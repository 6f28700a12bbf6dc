"""Block-wise layers against vLLM's own tensors, cut from the same weights. No vLLM, no processes.

Weights are whole numbers, so that every order of summing gives the same result.
"""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from spmdflow.blocks.hash import positional_hash
from spmdflow.errors import ConfigError
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.vllm_blocks import (
    ColumnShards,
    RowShards,
    VocabularyShards,
    column_order,
    install,
    is_whole,
    shard_tensors,
    vllm_names,
)
from spmdflow.weights.move import fill
from spmdflow.weights.ranks import megatron_shards, vllm_shards
from tests.unit.weight_shapes import VARIANTS, architecture, empty_of, reader_of, values_of

SIZES = (1, 2, 4, 8)
MULTIPLE = 128  # what vLLM makes of a vocabulary of 100


def _replica(tp_size: int, tp_rank: int) -> Replica:
    return Replica(tp_rank, tuple(range(tp_size)), tuple(range(tp_size)), (tp_rank,))


def _shards(arch, values, replica: Replica, tp_size: int):
    """The trainer's tensors for one generation rank, by vLLM's parameter."""
    found = {}
    for name, wanted in _tensors(arch, replica, tp_size).items():
        found[name] = []
        for tensor in wanted:
            local = empty_of(table := {name: tensor})
            fill(local, table, reader_of(values))
            found[name] += local.values()
    return found


def _tensors(arch, replica: Replica, tp_size: int):
    return shard_tensors(
        arch, replica, tp_size=tp_size, vocab_multiple=MULTIPLE, replica_rank=replica.replica_rank
    )


def _stock(arch, values, replica: Replica):
    """vLLM's own tensors of one generation rank."""
    sizes = {"tp_size": replica.tp_size, "tp_rank": replica.tp_rank, "pp_size": 1, "pp_rank": 0}
    local = empty_of(table := vllm_shards(arch, **sizes))
    fill(local, table, reader_of(values))
    return local


class _Layer(torch.nn.Module):
    """The attributes of a vLLM layer that block-wise methods touch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)


def _model(stock) -> torch.nn.Module:
    """A module tree with vLLM's names and tensors."""
    model = torch.nn.Module()
    for name in (name for name in stock if name.endswith(".weight")):
        *path, last = name.removesuffix(".weight").split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        bias = stock.get(name.removesuffix("weight") + "bias")
        owner.add_module(last, _Layer(stock[name], bias))
    if not hasattr(model, "lm_head"):
        model.lm_head = _Layer(stock["model.embed_tokens.weight"], None)
        model.lm_head.quant_method = None  # vLLM's tied head is a layer of its own
    return model


@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    sizes=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)).filter(lambda s: s[0] >= s[1]),
    data=st.data(),
)
def test_every_layer_of_training_shards_gives_what_vllms_own_tensors_give(variant, sizes, data):
    tp_size, gen_tp_size = sizes
    replica = _replica(gen_tp_size, data.draw(st.integers(0, gen_tp_size - 1)))
    arch = architecture(variant, num_hidden_layers=2, head_dim=8)
    values = {name: tensor % 31 - 15 for name, tensor in values_of(arch).items()}
    stock = {name: tensor.clone() for name, tensor in _stock(arch, values, replica).items()}
    shards = _shards(arch, values, replica, tp_size)
    model = _model({name: tensor.clone() for name, tensor in stock.items()})
    x = torch.arange(2 * arch.hidden_size).view(2, -1).double() % 7 - 3
    everyone = [
        _shards(arch, values, _replica(gen_tp_size, rank), tp_size) for rank in range(gen_tp_size)
    ]

    def gather(columns: torch.Tensor) -> torch.Tensor:
        assert gen_tp_size > arch.num_kv_heads
        layer = next(n for n in (0, 1) if torch.equal(columns, _mixed(x, shards, n)))
        return torch.cat([_mixed(x, rank_shards, layer) for rank_shards in everyone], -1)

    install(model, arch, shards, replica, gather, tp_size=tp_size, vocab_multiple=MULTIPLE)

    for name in (name for name in stock if name.endswith(".weight")):
        layer = model.get_submodule(name.removesuffix(".weight"))
        bias = stock.get(name.removesuffix("weight") + "bias")
        if "norm" in name:
            assert torch.equal(layer.weight, stock[name])
        elif "embed_tokens" in name:
            ids = torch.arange(len(stock[name]))
            assert torch.equal(layer.quant_method.embedding(layer, ids), stock[name])
        else:
            width = stock[name].shape[1]
            rows = torch.arange(2 * width).view(2, -1).double() % 7 - 3
            found = layer.quant_method.apply(layer, rows, layer.bias)
            assert torch.equal(found, F.linear(rows, stock[name], bias)), name
    head = model.lm_head
    whole = stock.get("lm_head.weight", stock["model.embed_tokens.weight"])
    assert torch.equal(head.quant_method.apply(head, x), F.linear(x, whole))


def _mixed(x, shards, layer):
    """A rank's part of Megatron's interleaved q, k and v."""
    name = f"model.layers.{layer}.self_attn.qkv_proj"
    biases = shards.get(f"{name}.bias", [None] * 99)
    return torch.cat([F.linear(x, w, b) for w, b in zip(shards[f"{name}.weight"], biases)], -1)


QKV = "model.layers.0.self_attn.qkv_proj.weight"


@given(
    kv_heads=st.sampled_from(SIZES), tp_size=st.sampled_from(SIZES), parts=st.sampled_from(SIZES)
)
def test_order_of_qkv_columns_takes_every_column_of_a_rank_once(kv_heads, tp_size, parts):
    arch = architecture(num_key_value_heads=kv_heads, head_dim=8)
    few = kv_heads < tp_size
    trainer = (_replica(1, 0), 1) if few else (_replica(tp_size, 0), min(8, tp_size * parts))
    shards = _tensors(arch, *trainer)[QKV]
    stock = vllm_shards(arch, tp_size=tp_size, tp_rank=0, pp_size=1, pp_rank=0)[QKV]
    columns = [
        (shard, column)
        for shard, low, high in column_order(stock, shards)
        for column in range(low, high)
    ]

    assert len(columns) == len(set(columns))
    heads = arch.num_heads // tp_size + 2 * max(1, kv_heads // tp_size)
    assert len(columns) == heads * arch.head_dim
    everyone = {(s, c) for s, shard in enumerate(shards) for c in range(shard.shape[0])}
    assert few or set(columns) == everyone


def test_one_shard_that_lies_as_vllm_wants_it_is_used_without_a_copy():
    arch = architecture(num_key_value_heads=1)
    replica = _replica(1, 0)
    weight = torch.randn((arch.num_heads + 2) * arch.head_dim, 16)
    stock = vllm_shards(arch, tp_size=1, tp_rank=0, pp_size=1, pp_rank=0)[QKV]

    runs = column_order(stock, _tensors(arch, replica, 1)[QKV])

    assert runs == [(0, 0, len(weight))]
    assert ColumnShards([weight], None, runs, None)._runs == []


def test_bfloat16_products_are_summed_in_float32_and_rounded_once():
    torch.manual_seed(0)
    weights = [torch.randn(64, 32).bfloat16() for _ in range(8)]
    x = torch.randn(5, 256).bfloat16()

    found = RowShards(weights).apply(None, x)

    exact = x.double() @ torch.cat(weights, 1).double().T
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)  # one rounding


def test_views_are_read_anew_so_that_shards_can_change_in_place():
    weight = torch.ones(4, 3)
    layer = VocabularyShards([weight[:2], weight[2:]])
    before = layer.embedding(None, torch.tensor([0, 3]))

    weight[3] = 7.0

    assert before.tolist() == [[1.0] * 3, [1.0] * 3]
    assert layer.embedding(None, torch.tensor([0, 3])).tolist() == [[1.0] * 3, [7.0] * 3]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_hashes_of_what_blocks_read_are_those_of_whole_tensors(tp_size):
    arch = architecture("qwen3, tied")
    replica = Replica.alone()
    values = values_of(arch)
    shards = _shards(arch, values, replica, tp_size)

    model = _model(_stock(arch, values, replica))

    reading = install(
        model, arch, shards, replica, torch.clone, tp_size=tp_size, vocab_multiple=MULTIPLE
    )

    expected = {name: positional_hash(tensor) for name, tensor in values.items()}
    assert reading.hashes(replica, torch.device("cpu")) == expected
    shards["model.layers.1.mlp.down_proj.weight"][-1][2, 3] += 1
    found = reading.hashes(replica, torch.device("cpu"))
    assert [name for name in expected if found[name] != expected[name]] == [
        "model.layers.1.mlp.down_proj.weight"
    ]


def test_shards_that_are_missing_misshapen_or_cut_otherwise_are_refused():
    arch = architecture()
    replica = Replica.alone()
    shards = _shards(arch, values_of(arch), replica, 2)
    sizes = {"tp_size": 2, "vocab_multiple": MULTIPLE}

    name = "model.layers.3.mlp.gate_up_proj.weight"
    without = {key: views for key, views in shards.items() if key != name}
    with pytest.raises(ConfigError, match=f"got views of shapes None for {name}, expected"):
        install(None, arch, without, replica, torch.clone, **sizes)
    short = shards | {name: shards[name][:1]}
    with pytest.raises(ConfigError, match=rf"got views of shapes \[\(48, 16\)\] for {name}"):
        install(None, arch, short, replica, torch.clone, **sizes)
    with pytest.raises(ConfigError, match="expected a multiple of t2 and equal padding"):
        install(None, arch, shards, _replica(2, 0), torch.clone, tp_size=1, vocab_multiple=MULTIPLE)
    with pytest.raises(ConfigError, match="vocabulary 100 padded to 104"):
        install(None, arch, shards, replica, torch.clone, tp_size=2, vocab_multiple=8)


def test_every_megatron_tensor_of_a_stage_has_vllms_name_with_the_models_layer_number():
    arch = architecture("llama, biases")
    sizes = {"tp_size": 2, "tp_rank": 0, "vocab_multiple": MULTIPLE}
    stage = megatron_shards(arch, pp_size=2, pp_rank=1, **sizes)

    names = vllm_names(arch, pp_size=2, pp_rank=1)

    assert names.keys() == stage.keys()
    assert len(set(names.values())) == len(stage)
    assert names["output_layer.weight"] == "lm_head.weight"
    layer = "decoder.layers.1"
    assert names[f"{layer}.mlp.linear_fc2.bias"] == "model.layers.3.mlp.down_proj.bias"
    assert names[f"{layer}.self_attention.linear_qkv.bias"] == QKV.replace("0", "3").replace(
        "weight", "bias"
    )
    whole = {name for name, tensor in stage.items() if is_whole(names[name])}
    assert whole == {
        name
        for name, tensor in stage.items()
        if tensor.shape
        == megatron_shards(arch, pp_size=2, pp_rank=1, **{**sizes, "tp_size": 1})[name].shape
    }


def test_stages_of_generation_need_their_own_layers_and_a_tied_embedding_twice():
    arch = architecture("qwen3, tied", num_hidden_layers=3)
    wanted = []
    for stage in (0, 1):
        replica = Replica(stage, (0, 1), (stage,), (0, 1))
        wanted.append(set(_tensors(arch, replica, 2)))

    layers = [{re.sub(r"\D", "", name) for name in stage if "layers" in name} for stage in wanted]
    assert layers == [{"0", "1"}, {"2"}]
    assert [sorted(name for name in stage if "layers" not in name) for stage in wanted] == [
        ["model.embed_tokens.weight"],
        ["model.embed_tokens.weight", "model.norm.weight"],
    ]
