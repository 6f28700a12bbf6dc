"""Shard tables against the definitions: every element, every layout, both ways."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.blocks.box import Box, describe_boxes, own_boxes
from spmdflow.blocks.hash import MODULUS, box_hash, positional_hash
from spmdflow.errors import ConfigError, PlanError
from spmdflow.weights.adapter import ALL_LINEAR, Adapters
from spmdflow.weights.move import Blocks, blocks, fill, own_parts
from spmdflow.weights.ranks import megatron_shards, row_shards, vllm_shards
from spmdflow.weights.table import parameters
from tests.unit.weight_shapes import (
    DENSE,
    MIXTURES,
    SIZES,
    architecture,
    architectures,
    count,
    empty_of,
    gathered,
    reader_of,
    values_of,
)


@st.composite
def replicas(draw):
    """(architecture, tables of the ranks that hold one copy of it together)."""
    kind = draw(st.sampled_from(["megatron", "vllm", "fsdp", "whole"]))
    head = "causal_lm" if kind == "vllm" else None
    arch = draw(architectures(head=head, families=DENSE + MIXTURES))
    if kind != "megatron":
        some = [None, Adapters(3, (ALL_LINEAR,)), Adapters(5, ("q_proj", "down_proj"))]
        arch = replace(arch, adapters=draw(st.sampled_from(some)))
    if kind == "whole":
        return arch, [row_shards(arch, shard_size=1, shard_rank=0)]
    if kind == "fsdp":
        ep_size = draw(st.sampled_from([1, 2, 4])) if arch.num_experts else 1
        size = ep_size * draw(st.integers(1, 7 // ep_size))
        parts = {"shard_size": size, "ep_size": ep_size}
        return arch, [row_shards(arch, shard_rank=r, **parts) for r in range(size)]
    tp_size = draw(st.sampled_from(SIZES))
    pp_size = draw(st.integers(1, arch.num_layers))
    places = [{"tp_rank": tp, "pp_rank": pp} for pp in range(pp_size) for tp in range(tp_size)]
    sizes = {"tp_size": tp_size, "pp_size": pp_size}
    if kind == "vllm":
        can_divide = arch.num_experts and arch.num_experts % tp_size == 0
        sizes["divides_experts"] = bool(can_divide) and draw(st.booleans())
        return arch, [vllm_shards(arch, **sizes, **place) for place in places]
    sizes["vocab_multiple"] = math.lcm(64, tp_size)
    sizes["ep_size"] = draw(st.sampled_from([1, 2, 4])) if arch.num_experts else 1
    places = [place | {"ep_rank": ep} for ep in range(sizes["ep_size"]) for place in places]
    return arch, [megatron_shards(arch, **sizes, **place) for place in places]


@settings(max_examples=80, deadline=None)
@given(replica=replicas())
def test_whole_tensors_survive_being_filled_into_shards_and_gathered(replica):
    arch, tables = replica
    values = values_of(arch)
    locals_ = [empty_of(table) for table in tables]

    for local, table in zip(locals_, tables, strict=True):
        fill(local, table, reader_of(values))
    parts = [b for local, table in zip(locals_, tables, strict=True) for b in blocks(local, table)]
    shapes = {parameter.name: parameter.shape for parameter in parameters(arch)}
    again = dict(gathered(parts, shapes))

    assert list(again) == list(values)
    assert all(torch.equal(again[name], values[name]) for name in values)
    for local, table in zip(locals_, tables, strict=True):
        for name, tensor in table.items():
            assert (local[name] >= 0).all(), "neither a value nor padding"
            assert int((local[name] == 0).sum()) == tensor.padding


def owned(tables):
    """What each rank owns of each of its pieces."""
    pieces = [[piece for x in table.values() for piece in x.pieces] for table in tables]
    held = [describe_boxes((piece.name, piece.box) for piece in each) for each in pieces]
    return [own_boxes(held, place) for place in range(len(tables))]


@settings(max_examples=80, deadline=None)
@given(replica=replicas())
def test_every_element_is_held_by_a_replica_and_owned_once(replica):
    arch, tables = replica
    times = {each.name: torch.zeros(each.shape, dtype=torch.int64) for each in parameters(arch)}

    held = [count(table, arch) for table in tables]
    for table, mine in zip(tables, owned(tables), strict=True):
        for name, view, box in own_parts(blocks(empty_of(table), table), mine):
            assert view.shape == box.shape
            times[name][box.slices()] += 1

    for name, found in times.items():
        assert (sum(rank[name] for rank in held) >= 1).all()
        assert (found == 1).all()


@settings(max_examples=60, deadline=None)
@given(replica=replicas(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_hashes_of_owned_boxes_add_up_to_the_hash_of_the_whole_tensor(replica, dtype):
    arch, tables = replica
    values = {name: tensor.to(dtype) for name, tensor in values_of(arch).items()}
    found = dict.fromkeys(values, 0)

    for table, mine in zip(tables, owned(tables), strict=True):
        local = {name: tensor.to(dtype) for name, tensor in empty_of(table).items()}
        fill(local, table, reader_of(values))
        for name, part, box in own_parts(blocks(local, table), mine):
            found[name] += box_hash(part, box)

    whole = {name: positional_hash(tensor) for name, tensor in values.items()}
    assert {name: total % MODULUS for name, total in found.items()} == whole


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_hash_of_a_box_of_any_dimension_does_not_depend_on_how_it_is_cut(data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    values = torch.randn(shape)
    box = Box(tuple((low, high) for low, high in bounds))
    total = 0

    for dim, (low, high) in enumerate(bounds):
        first, second = box.cut(dim, data.draw(st.integers(low, high)))
        total = box_hash(values[first.slices()], first)
        total += box_hash(values[second.slices()], second)
        assert total % MODULUS == box_hash(values[box.slices()], box)
    rest = Box.of_shape(shape).subtract(box)
    total = box_hash(values[box.slices()], box)
    total += sum(box_hash(values[part.slices()], part) for part in rest)
    assert total % MODULUS == positional_hash(values)


def test_hash_of_a_large_column_box_is_the_same_in_one_piece_and_row_by_row():
    values = torch.randn(3000, 900)
    box = Box(((0, 3000), (100, 900)))

    total = sum(
        box_hash(values[row : row + 1, 100:], Box(((row, row + 1), (100, 900))))
        for row in range(3000)
    )

    assert box_hash(values[:, 100:], box) == total % MODULUS


def test_wrong_place_changes_the_hash_of_a_box():
    values = torch.randn(8, 8)

    here = box_hash(values[:4, :4], Box(((0, 4), (0, 4))))
    there = box_hash(values[:4, :4], Box(((0, 4), (4, 8))))

    assert here != there


def test_tied_copy_is_on_the_last_megatron_stage_only_if_there_are_several():
    arch = architecture("llama, tied")

    def last(pp_size):
        return megatron_shards(
            arch, tp_size=2, tp_rank=0, pp_size=pp_size, pp_rank=pp_size - 1, vocab_multiple=64
        )

    assert "output_layer.weight" not in last(1)
    assert last(2)["output_layer.weight"].pieces[0].name == "model.embed_tokens.weight"
    assert "output_layer.weight" in megatron_shards(
        architecture("llama, tied", head="scalar"),
        tp_size=1,
        tp_rank=0,
        pp_size=1,
        pp_rank=0,
        vocab_multiple=64,
    )


@pytest.mark.parametrize(
    ("shards", "variant", "sizes", "message"),
    [
        (vllm_shards, "llama", (3, 1), "vllm: got tensor-parallel size 3 for 8 attention and 4"),
        (vllm_shards, "llama", (1, 5), "vllm: got 5 pipeline stages for 4 layers"),
        (megatron_shards, "llama", (16, 1), "megatron: got tensor-parallel size 16"),
        (megatron_shards, "mistral, one kv head", (8, 1), r"got 60 rows of q, k and v"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(shards, variant, sizes, message):
    extra = {"vocab_multiple": 64} if shards is megatron_shards else {}

    with pytest.raises(ConfigError, match=message):
        shards(
            architecture(variant), tp_size=sizes[0], tp_rank=0, pp_size=sizes[1], pp_rank=0, **extra
        )


def test_biases_that_megatron_cannot_hold_are_refused():
    with pytest.raises(ConfigError, match=r"got biases qkv True, o True, mlp False"):
        megatron_shards(
            architecture(attention_bias=True),
            tp_size=1,
            tp_rank=0,
            pp_size=1,
            pp_rank=0,
            vocab_multiple=64,
        )


def test_scalar_head_and_qwen3_output_bias_are_refused_for_vllm():
    for arch, message in [
        (architecture(head="scalar"), "got a model with a scalar head"),
        (architecture("qwen3, tied", attention_bias=True), "q_proj.bias, expected one whose"),
    ]:
        with pytest.raises(ConfigError, match=message):
            vllm_shards(arch, tp_size=1, tp_rank=0, pp_size=1, pp_rank=0)


def test_reader_without_all_elements_and_local_tensor_of_another_shape_are_refused():
    arch = architecture()
    table = row_shards(arch, shard_size=2, shard_rank=0)
    local = empty_of(table)
    reader = Blocks(blocks(local, table))

    with pytest.raises(PlanError, match=r"model.norm.weight: got no values of box \(\(8, 16\),\)"):
        reader.read("model.norm.weight", Box(((0, 16),)))
    local["model.norm.weight"] = torch.zeros(16).double()
    with pytest.raises(PlanError, match=r"model.norm.weight: got \(16,\), expected shape \(8,\)"):
        fill(local, table, reader.read)
