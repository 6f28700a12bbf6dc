"""Attention scores that no kernel computes: what a plan counts, and what autograd keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmdflow.mapping.dataflow import Engine, Model, Strategy, Workload
from spmdflow.mapping.memory import call_bytes
from spmdflow.weights.architecture import Architecture
from spmdflow.workers.attention import AttentionForm, PackedRows, packed_attention
from tests.saved_bytes import record_saved_bytes

ROWS = 2
TOKENS = 256
HEADS = 4
SIZES = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 320},
    **{"num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": 2},
    "max_position_embeddings": 512,
}
FORMS = {"sinks": {"has_sinks": True}, "caps": {"caps_scores": True}}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def saved_score_bytes(form: str, dtype: torch.dtype) -> int:
    """Of tensors as large as the scores, for the backward of one layer's attention."""
    query, key, value = (
        torch.randn(ROWS * TOKENS, heads, 16, dtype=dtype, requires_grad=True, device="cpu")
        for heads in (HEADS, 2, 2)
    )
    sinks = torch.zeros(HEADS, requires_grad=True)
    attention = AttentionForm(sinks=sinks) if form == "sinks" else AttentionForm(cap=50.0)

    def is_score(tensor: Tensor) -> bool:
        return tensor.numel() > TOKENS * TOKENS and tensor.dtype != torch.bool

    rows = PackedRows.of([TOKENS] * ROWS)
    with record_saved_bytes(is_score) as num_bytes:
        output = packed_attention(query, key, value, rows, attention)
        assert output.requires_grad
    return sum(num_bytes.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_planned_scores_are_those_that_a_backward_needs(form: str, dtype: str) -> None:
    """At most what the plan counts: a CPU computes blocks of queries, without keys after them."""
    plain = Architecture.from_config(SIZES)
    engine = Engine(kind="fsdp", micro_batch_rows=ROWS, dtype=dtype)
    work = Workload(num_sequences=ROWS, prompt_tokens=TOKENS / 2, response_tokens=TOKENS / 2)
    activations = []
    for shape in (plain, replace(plain, **FORMS[form])):
        model = Model("actor", shape, trained=True, engine=engine)
        parts = call_bytes(model, "train", work, Strategy(1, 1, 1))
        activations.append(float(parts["activations"]))
    num_scores = ROWS * HEADS * TOKENS * TOKENS
    size = DTYPES[dtype].itemsize
    bytes_per_score = 4 * (1 + (form == "caps")) + (size if size < 4 else 0)

    planned = num_scores * bytes_per_score
    saved = saved_score_bytes(form, DTYPES[dtype])

    assert activations[1] - activations[0] >= planned
    assert 0.4 * planned <= saved <= 1.05 * planned


def test_sinks_and_caps_are_read_from_a_config() -> None:
    gpt_oss = Architecture.sizes_from_config(SIZES | {"model_type": "gpt_oss"})
    gemma = Architecture.sizes_from_config(
        SIZES | {"model_type": "gemma2", "attn_logit_softcapping": 50.0}
    )

    assert gpt_oss.has_sinks and not gpt_oss.caps_scores
    assert gemma.caps_scores and not gemma.has_sinks
    assert not Architecture.from_config(SIZES).has_sinks
