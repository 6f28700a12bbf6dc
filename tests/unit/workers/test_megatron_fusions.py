"""Megatron's switches of fused kernels: their names, and where they are on."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec

import pytest

if find_spec("megatron") is None:
    pytest.skip("the megatron extra is not installed", allow_module_level=True)

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig

from spmdflow.workers.megatron_model import fusions


def test_switches_are_megatrons_and_so_is_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fusions((), on_cuda=True)

    assert found.keys() <= {field.name for field in fields(TransformerConfig)}
    assert found["bias_activation_fusion"] and found["bias_dropout_fusion"]
    assert found["apply_rope_fusion"] == (rope_utils.fused_apply_rotary_pos_emb is not None)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", print)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    assert set(fusions((), on_cuda=True).values()) == {True}


def test_no_kernel_is_fused_on_a_cpu_or_where_nobody_wants_it() -> None:
    assert set(fusions((), on_cuda=False).values()) == {False}
    assert set(fusions(("no_fusions",), on_cuda=True).values()) == {False}
