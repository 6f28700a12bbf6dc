"""Names of TransformerEngine that the Megatron engine leans on, in Megatron's own source.

Read, not imported: without TransformerEngine Megatron puts mocks in their place.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
EXTENSION = "extensions/transformer_engine.py"
BASES = {
    "TELinear": "te.pytorch.Linear",
    "TELayerNormColumnParallelLinear": "te.pytorch.LayerNormLinear",
    "TEColumnParallelLinear": "TELinear",
    "TERowParallelLinear": "TELinear",
    "TEDotProductAttention": "te.pytorch.DotProductAttention",
}
CALLS = {
    "Linear": {"in_features", "out_features", "sequence_parallel", "tp_group", "tp_size", "bias"},
    "LayerNormLinear": {"eps", "sequence_parallel", "tp_group", "parallel_mode", "bias"},
    "DotProductAttention": {"num_attention_heads", "kv_channels", "attn_mask_type", "tp_group"},
    "RMSNorm": {"eps", "sequence_parallel"},
}
"""Class of TransformerEngine -> arguments that Megatron gives it."""
WIDTHS = {"hidden_size", "normalized_shape"}
"""How Megatron names the width of a norm: up to 0.18, and since 0.19."""


def source(name: str) -> ast.Module:
    """A file of Megatron-Core, parsed."""
    spec = find_spec("megatron.core") if find_spec("megatron") is not None else None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the megatron extra is not installed")
    return ast.parse(Path(spec.submodule_search_locations[0], name).read_text())


def found(tree: ast.AST, kind: Any, name: str) -> Any:
    """The first class or function of this name."""
    return next(x for x in ast.walk(tree) if isinstance(x, kind) and x.name == name)


def keywords(tree: ast.AST, called: str) -> set[str | None]:
    """Of all calls of a name."""
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and ast.unparse(x.func) == called]
    return {keyword.arg for call in calls for keyword in call.keywords}


def layer_function(name: str) -> ast.FunctionDef:
    """The function that puts a layer together; Megatron 0.16 and 0.19 name it differently."""
    tree = source("models/gpt/gpt_layer_specs.py")
    names = {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
    if f"{name}_submodules" in names:
        name += "_submodules"
    else:
        name += "_spec"
    function: ast.FunctionDef = found(tree, ast.FunctionDef, name)
    return function


@pytest.mark.parametrize("name", BASES)
def test_wrapper_has_the_base_whose_parameters_are_mapped(name: str) -> None:
    wrapper = found(source(EXTENSION), ast.ClassDef, name)

    assert [ast.unparse(base) for base in wrapper.bases] == [BASES[name]]


@pytest.mark.parametrize("name", CALLS)
def test_class_of_transformer_engine_is_given_what_it_needs(name: str) -> None:
    tree = source(EXTENSION)
    wrapper = next((w for w, base in BASES.items() if base == f"te.pytorch.{name}"), None)
    if wrapper is None:
        norm = found(tree, ast.ClassDef, "TENorm")
        given = keywords(norm, f"te.pytorch.{name}") or keywords(norm, "norm_module")
        assert given & WIDTHS
    else:
        given = keywords(found(tree, ast.ClassDef, wrapper), "super().__init__")

    assert CALLS[name] <= given


def test_fused_norms_have_the_names_that_megatron_gives_them() -> None:
    text = (ROOT / "spmdflow/workers/megatron_model.py").read_text()
    ours = next(
        ast.literal_eval(x.value)
        for x in ast.parse(text).body
        if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "_FUSED_NORMS"
    )
    local = layer_function("get_gpt_layer_local")
    (names,) = (
        ast.literal_eval(x.value)
        for x in ast.walk(local)
        if isinstance(x, ast.keyword) and x.arg == "sharded_state_dict_keys_map"
    )

    theirs = {fused + "weight": plain + "weight" for plain, fused in names.items()}

    assert ours == theirs


def test_layer_of_transformer_engine_fuses_norm_and_linear() -> None:
    provider = found(
        source("extensions/transformer_engine_spec_provider.py"), ast.ClassDef, "TESpecProvider"
    )
    returned = {
        name: ast.unparse(found(provider, ast.FunctionDef, name).body[-1])
        for name in ("column_parallel_layer_norm_linear", "row_parallel_linear", "core_attention")
    }
    layer = layer_function("get_gpt_layer_with_transformer_engine")

    assert list(returned.values()) == [
        "return TELayerNormColumnParallelLinear",
        "return TERowParallelLinear",
        "return TEDotProductAttention",
    ]
    assert "qk_layernorm" in {argument.arg for argument in layer.args.args}
