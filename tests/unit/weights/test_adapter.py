"""Which weights get adapters, and what of them moves to generators of any layout."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.hybrid_engine.reshard import Copies, boxes_of, moved_boxes, plan_reshard, scopes_of
from spmdflow.parallel.layout import Layout
from spmdflow.plan.check import check_weight_copies
from spmdflow.weights.adapter import (
    ALL_LINEAR,
    Adapters,
    adapter_scale,
    is_adapter,
    is_b,
    is_target,
)
from spmdflow.weights.ranks import megatron_tables, row_tables, vllm_tables
from spmdflow.weights.table import shapes_by_name
from tests.unit.weight_shapes import architecture


def test_target_is_the_end_of_a_name_in_whole_words() -> None:
    layer = "model.layers.0.self_attn.q_proj"

    assert is_target(layer, ["q_proj"]) and is_target(layer, ["self_attn.q_proj", "x"])
    assert is_target(layer, [ALL_LINEAR]) and is_target(layer, [layer])
    assert not is_target(layer, ["proj", "k_proj"]) and not is_target(layer, [])


def test_all_linear_layers_of_the_decoder_have_one_and_nothing_else_has() -> None:
    shapes = shapes_by_name(architecture("llama, biases"))
    found = Adapters(3, (ALL_LINEAR,)).shapes(shapes)

    weights = {name for name in shapes if name.endswith("_proj.weight")}
    assert len(found) == 2 * len(weights) == 2 * 7 * 4
    for name in weights:
        a, b = (name.replace(".weight", f".lora_{x}.weight") for x in "AB")
        assert found[a] == (3, shapes[name][1]) and found[b] == (shapes[name][0], 3)
        assert is_adapter(a) and is_adapter(b) and is_b(b) and not is_b(a)


@settings(max_examples=40, deadline=None)
@given(
    variant=st.sampled_from(["llama", "qwen2, two kv heads", "mistral, one kv head"]),
    rank=st.integers(1, 9),
    targets=st.sampled_from([(ALL_LINEAR,), ("q_proj", "v_proj"), ("down_proj",)]),
    num_ranks=st.sampled_from([1, 2, 4]),
    gen_tp=st.sampled_from([1, 2]),
    apart=st.booleans(),
    train_tp=st.sampled_from([0, 1, 2]),
)
def test_adapters_alone_move_each_element_once_to_each_rank_that_lacks_it(
    variant: str,
    rank: int,
    targets: tuple[str, ...],
    num_ranks: int,
    gen_tp: int,
    apart: bool,
    train_tp: int,
) -> None:
    """train_tp: tensor-parallel size under Megatron; 0: rows are divided."""
    arch = replace(architecture(variant), adapters=Adapters(rank, targets))
    training = Layout.data_parallel(tuple(range(num_ranks)))
    tables_of_training = row_tables
    if train_tp and arch.num_kv_heads % train_tp == 0 and num_ranks % train_tp == 0:
        sizes = {"tp_size": train_tp, "dp_size": num_ranks // train_tp}
        training = Layout(tuple(range(num_ranks)), pp_size=1, **sizes)
        tables_of_training = megatron_tables
    generation = replace(training, gen_tp_size=min(gen_tp, num_ranks))
    if apart:
        generation = Layout((8, 9), pp_size=1, dp_size=2 // gen_tp, tp_size=gen_tp)
    have, need = (
        moved_boxes(boxes_of(tables))
        for tables in (tables_of_training(arch, training), vllm_tables(arch, generation))
    )
    scopes = scopes_of(training, generation)
    plan = plan_reshard(have, need, scopes=scopes, element_bytes=4, bucket_bytes=1 << 16)

    assert check_weight_copies(Copies(plan, have, need), label="adapter") == []
    names = {name for bucket in plan.buckets for name, _ in bucket.moves} | dict(plan.local).keys()
    assert names == arch.adapters.shapes(shapes_by_name(arch)).keys()


@pytest.mark.parametrize("variant", ["llama", "qwen2, two kv heads"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_megatron_divides_adapters_as_their_layers_and_has_every_element(
    variant: str, tp_size: int
) -> None:
    arch = replace(architecture(variant), adapters=Adapters(3, (ALL_LINEAR,)))
    layout = Layout(tuple(range(tp_size)), pp_size=1, dp_size=1, tp_size=tp_size)
    shapes = {n: x for n, x in shapes_by_name(arch).items() if is_adapter(n)}
    have = moved_boxes(boxes_of(megatron_tables(arch, layout)))

    for rank in range(tp_size):
        assert have[rank].keys() == shapes.keys()
        for name, boxes in have[rank].items():
            has_columns = name.split(".")[-3] in ("o_proj", "down_proj")
            share = tp_size if is_b(name) != has_columns else 1
            assert sum(box.size for box in boxes) * share == prod(shapes[name]), name


def test_modules_to_save_have_no_adapter_and_are_trained() -> None:
    shapes = shapes_by_name(architecture("llama"))
    adapters = Adapters(3, (ALL_LINEAR,), ("lm_head", "0.self_attn.o_proj", "norm"))

    found = adapters.shapes(shapes)

    saved = {name for name in shapes if adapters.is_saved(name)}
    assert saved == {
        "lm_head.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.norm.weight",
    }
    assert not any("layers.0.self_attn.o_proj" in name for name in found)
    assert any("layers.1.self_attn.o_proj" in name for name in found)
    assert all(adapters.is_trained(name) for name in [*found, *saved])
    assert not any(adapters.is_trained(name) for name in shapes.keys() - saved)


def test_scale_is_alpha_by_the_rank_or_with_rslora_by_its_root() -> None:
    assert adapter_scale(16, 32.0, rslora=False) == 2
    assert adapter_scale(16, 32.0, rslora=True) == 8


def test_without_adapters_all_weights_move() -> None:
    boxes = boxes_of(row_tables(architecture(), Layout.data_parallel((0, 1))))

    assert moved_boxes(boxes) is boxes


@pytest.mark.parametrize("targets", [(), ("nothing",)])
def test_targets_that_name_no_layer_add_nothing(targets: tuple[str, ...]) -> None:
    assert Adapters(4, targets).shapes(shapes_by_name(architecture())) == {}
