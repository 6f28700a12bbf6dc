"""Which weights get adapters, and what of them moves to generators of any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.hybrid_engine.reshard import Copies, boxes_of, moved_boxes, plan_reshard, scopes_of
from spmdflow.parallel.layout import Layout
from spmdflow.plan.check import check_weight_copies
from spmdflow.weights.adapter import ALL_LINEAR, Adapters, is_adapter, is_b, is_target
from spmdflow.weights.ranks import row_tables, vllm_tables
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
)
def test_adapters_alone_move_each_element_once_to_each_rank_that_lacks_it(
    variant: str, rank: int, targets: tuple[str, ...], num_ranks: int, gen_tp: int, apart: bool
) -> None:
    arch = replace(architecture(variant), adapters=Adapters(rank, targets))
    training = Layout.data_parallel(tuple(range(num_ranks)))
    generation = replace(training, gen_tp_size=min(gen_tp, num_ranks))
    if apart:
        generation = Layout((8, 9), pp_size=1, dp_size=2 // gen_tp, tp_size=gen_tp)
    have, need = (
        moved_boxes(boxes_of(tables))
        for tables in (row_tables(arch, training), vllm_tables(arch, generation))
    )
    scopes = scopes_of(training, generation)
    plan = plan_reshard(have, need, scopes=scopes, element_bytes=4, bucket_bytes=1 << 16)

    assert check_weight_copies(Copies(plan, have, need), label="adapter") == []
    names = {name for bucket in plan.buckets for name, _ in bucket.moves} | dict(plan.local).keys()
    assert names == arch.adapters.shapes(shapes_by_name(arch)).keys()


def test_without_adapters_all_weights_move() -> None:
    boxes = boxes_of(row_tables(architecture(), Layout.data_parallel((0, 1))))

    assert moved_boxes(boxes) is boxes


@pytest.mark.parametrize("targets", [(), ("nothing",)])
def test_targets_that_name_no_layer_add_nothing(targets: tuple[str, ...]) -> None:
    assert Adapters(4, targets).shapes(shapes_by_name(architecture())) == {}
