"""Which rank writes which tensor of a Hugging Face folder, and what the others send it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.blocks.box import Box, disjoint
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.file import Facts
from spmdflow.weights.ranks import megatron_tables, row_tables
from spmdflow.weights.table import parameters
from spmdflow.workers.export import Held, plan_files, sources
from tests.unit.weight_shapes import architecture

BF16 = torch.bfloat16


def held_by(arch: Architecture, layout: Layout, tables) -> dict[str, Held]:
    found: dict[str, list[tuple[int, Box]]] = {}
    for place, rank in enumerate(layout.ranks):
        for tensor in tables(arch, layout)[rank].values():
            for piece in tensor.pieces:
                found.setdefault(piece.name, []).append((place, piece.box))
    return found


LAYOUTS = {
    "fsdp on 4": (Layout((0, 1, 2, 3), dp_size=4, shard_size=4), row_tables),
    "hsdp s2 on 4": (Layout((0, 1, 2, 3), dp_size=4, shard_size=2), row_tables),
    "zero1 on 4": (Layout((0, 1, 2, 3), dp_size=4, shard_size=1), row_tables),
    "megatron t2p2d2": (Layout(tuple(range(8)), dp_size=2, tp_size=2, pp_size=2), megatron_tables),
    "megatron t2d2": (Layout((0, 1, 2, 3), dp_size=2, tp_size=2), megatron_tables),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("variant", ["llama", "qwen3, tied"])
def test_every_tensor_is_written_once_by_a_rank_that_holds_as_much_as_any(name: str, variant: str):
    layout, tables = LAYOUTS[name]
    arch = architecture(variant)
    held = held_by(arch, layout, tables)
    facts = [Facts(*each[:1], BF16, each[1]) for each in parameters(arch)]

    files = plan_files(facts, held, layout.size, least_bytes=1)

    written = [each.name for file in files for each in file.tensors]
    assert sorted(written) == sorted(each.name for each in facts)
    assert {file.writer for file in files} == set(range(layout.size))
    for file in files:
        for each in file.tensors:
            whole = Box.of_shape(each.shape)
            found = sources(each, held[each.name], file.writer)
            assert sum(part.size for _, part in found) == whole.size
            assert len(disjoint(part for _, part in found)) == len(found)
            assert {(place, part) for place, part in found} == set(found)
            for place, part in found:
                assert any(p == place and box.contains(part) for p, box in held[each.name])
            most = max(
                sum(b.size for p, b in held[each.name] if p == q) for q in range(layout.size)
            )
            mine = sum(part.size for place, part in found if place == file.writer)
            assert 2 * mine >= most
    loads = [
        sum(x.num_bytes for f in files if f.writer == p for x in f.tensors)
        for p in range(layout.size)
    ]
    largest = max(each.num_bytes for each in facts)
    stages = layout.pp_size
    assert max(loads) <= sum(loads) / layout.size * (1 if stages == 1 else 1.5) + largest


def test_a_small_model_is_one_file_and_a_large_one_is_cut_at_the_largest_size():
    facts = [Facts(f"w{n}", BF16, (1 << 20,)) for n in range(8)]  # 2 MiB each
    held = {each.name: [(p, Box(((p << 18, p + 1 << 18),))) for p in range(4)] for each in facts}

    small = plan_files(facts, held, 4)
    some = plan_files(facts, held, 4, least_bytes=8 << 20)
    large = plan_files(facts, held, 4, least_bytes=1, most_bytes=2 << 20)

    assert [(file.writer, len(file.tensors)) for file in small] == [(0, 8)]
    assert [(file.writer, len(file.tensors)) for file in some] == [(0, 4), (2, 4)]
    assert [len(file.tensors) for file in large] == [1] * 8


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 5))
def test_what_overlaps_is_sent_once(cuts: list[int], writer: int):
    edges = [0, *sorted(cuts), 12]
    held = [(n, Box(((a, b),))) for n, (a, b) in enumerate(zip(edges, edges[1:], strict=False))]
    held += [(5, Box(((3, 9),)))]

    found = sources(Facts("w", BF16, (12,)), held, writer)

    assert sorted(x for _, box in found for x in range(*box.bounds[0])) == list(range(12))
    mine = [box for place, box in held if place == writer]
    kept = [part for place, part in found if place == writer]
    assert sum(box.size for box in mine) == sum(part.size for part in kept)
