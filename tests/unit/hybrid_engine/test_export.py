"""Which rank writes which tensor of a Hugging Face folder, and what the others send it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from spmdflow.blocks.box import Box
from spmdflow.hybrid_engine.export import plan_files
from spmdflow.hybrid_engine.reshard import boxes_of
from spmdflow.parallel.layout import Layout
from spmdflow.weights.file import Facts
from spmdflow.weights.ranks import megatron_tables, row_tables
from spmdflow.weights.table import parameters
from tests.unit.weight_shapes import architecture

BF16 = torch.bfloat16
LAYOUTS = {
    "fsdp on 4": (Layout((0, 1, 2, 3), dp_size=4, shard_size=4), row_tables),
    "hsdp s2 on 4": (Layout((4, 5, 8, 9), dp_size=4, shard_size=2), row_tables),
    "zero1 on 4": (Layout((0, 1, 2, 3), dp_size=4, shard_size=1), row_tables),
    "megatron t2p2d2": (Layout(tuple(range(8)), dp_size=2, tp_size=2, pp_size=2), megatron_tables),
    "megatron t2d2": (Layout((0, 1, 2, 3), dp_size=2, tp_size=2), megatron_tables),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("variant", ["llama", "qwen3, tied"])
def test_every_tensor_is_written_once_by_a_rank_that_holds_as_much_as_any(name: str, variant: str):
    layout, tables = LAYOUTS[name]
    arch = architecture(variant)
    have = boxes_of(tables(arch, layout))
    facts = [Facts(*each[:1], BF16, each[1]) for each in parameters(arch)]

    files = plan_files(facts, have, least_bytes=1)

    written = [each.name for file in files for each in file.tensors]
    assert sorted(written) == sorted(each.name for each in facts)
    assert {file.writer for file in files} == set(layout.ranks)
    for file in files:
        for each in file.tensors:
            shares = {r: sum(box.size for box in have[r].get(each.name, ())) for r in have}
            assert 2 * shares[file.writer] >= max(shares.values())
    loads = Counter({f.writer: sum(x.num_bytes for x in f.tensors) for f in files})
    largest = max(each.num_bytes for each in facts)
    stages = layout.pp_size
    most = loads.total() / layout.size * (1 if stages == 1 else 1.5) + largest
    assert max(loads.values()) <= most


def test_a_small_model_is_one_file_and_a_large_one_is_cut_at_the_largest_size():
    facts = [Facts(f"w{n}", BF16, (1 << 20,)) for n in range(8)]  # 2 MiB each
    have = {p: {each.name: (Box(((p << 18, p + 1 << 18),)),) for each in facts} for p in range(4)}

    small = plan_files(facts, have)
    some = plan_files(facts, have, least_bytes=8 << 20)
    large = plan_files(facts, have, least_bytes=1, most_bytes=2 << 20)

    assert [(file.writer, len(file.tensors)) for file in small] == [(0, 8)]
    assert [(file.writer, len(file.tensors)) for file in some] == [(0, 4), (2, 4)]
    assert [len(file.tensors) for file in large] == [1] * 8


def test_wider_tensors_come_first_in_every_file_and_over_the_files_of_a_writer():
    facts = [Facts(f"w{n}", torch.float32 if n == 5 else BF16, (64,)) for n in range(8)]
    have = {0: {each.name: (Box(((0, 64),)),) for each in facts}}

    files = plan_files(facts, have, most_bytes=400)

    names = [each.name for file in files for each in file.tensors]
    assert names == ["w5", "w0", "w1", "w2", "w3", "w4", "w6", "w7"] and len(files) > 1
