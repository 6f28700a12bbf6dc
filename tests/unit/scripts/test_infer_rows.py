"""Rows that `scripts/record_vllm.py` infers from tables, and tables that no rows give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from scripts.families.infer_rows import NoRowError, Observation, infer_rows
from scripts.families.tiny import FAMILIES, SIZES
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.recorded import RECORDS, read_recordings
from tests.unit.weight_shapes import family_architecture

LAYOUTS = ((1, 1, False), (2, 1, False), (4, 1, False), (1, 3, False), (2, 1, True))
"""Tensor- and pipeline-parallel size, and whether ranks divide whole experts."""


def observations(family: str) -> Iterator[Observation]:
    """Tables of the recorded rows, as if vLLM's loader had given them, without and with a head."""
    facts = SIZES | {"vocab_size": 99, "pad_token_id": 2, "num_hidden_layers": 3}
    facts |= {name: each for name, each in FAMILIES[family].items() if name != "layer_types"}
    facts = {name: each for name, each in facts.items() if each is not None}
    for is_tied in {bool(facts["tie_word_embeddings"]), True}:
        arch = family_architecture(family, facts | {"tie_word_embeddings": is_tied})
        for tp_size, pp_size, divides_experts in LAYOUTS:
            if arch.num_experts or not divides_experts:
                yield from tables_of(arch, tp_size, pp_size, divides_experts=divides_experts)


def tables_of(
    arch: Architecture, tp_size: int, pp_size: int, *, divides_experts: bool
) -> Iterator[Observation]:
    """The recorded tables of all ranks of a replica."""
    for rank in range(tp_size * pp_size):
        pp_rank, tp_rank = divmod(rank, tp_size)
        empty = Observation(
            arch=arch,
            tp_size=tp_size,
            tp_rank=tp_rank,
            pp_size=pp_size,
            pp_rank=pp_rank,
            divides_experts=divides_experts,
            table={},
        )
        table = read_recordings()[arch.family].table(
            empty.cut, pp_size=pp_size, pp_rank=pp_rank, divides_experts=divides_experts
        )
        yield replace(empty, table=table)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gpt2", "phi3", "gemma2"])
def test_rows_of_a_family_are_inferred_from_its_tables(family: str) -> None:
    recorded: dict[str, Any] = {}
    for recording in json.loads(RECORDS.read_text())["recordings"]:
        if family in recording["families"]:
            recorded = recording

    layers, groups = infer_rows(list(observations(family)))

    expected = []
    for stages, rows in recorded["groups"]:
        for row in rows:
            expected.append([stages, row])
    found = [[stages, row] for stages, rows in groups for row in rows]
    assert layers == recorded["layers"]
    assert len(found) > 8
    assert all(each in expected for each in found)


def test_parameter_that_no_way_gives_is_an_error_with_its_name() -> None:
    seen = list(observations("llama"))
    first, second = (replace(each, table=dict(each.table)) for each in seen[1:3])
    name = "model.layers.0.mlp.gate_up_proj.weight"
    exchanged = (second.table[name], first.table[name])
    seen[1:3] = [
        replace(first, table={**first.table, name: exchanged[0]}),
        replace(second, table={**second.table, name: exchanged[1]}),
    ]

    with pytest.raises(NoRowError, match=r"gives mlp.gate_up_proj.weight from mlp.gate_proj"):
        infer_rows(seen)


def test_parameter_on_the_middle_stage_alone_is_an_error_with_its_name() -> None:
    seen = list(observations("llama"))
    place = next(n for n, each in enumerate(seen) if each.pp_size == 3 and each.pp_rank == 0)
    first = dict(seen[place].table)
    moved = first.pop("model.embed_tokens.weight")
    seen[place] = replace(seen[place], table=first)
    middle = seen[place + 1]
    seen[place + 1] = replace(middle, table={"model.embed_tokens.weight": moved, **middle.table})

    with pytest.raises(NoRowError, match="model.embed_tokens.weight is on stages"):
        infer_rows(seen)
