"""Experts of a mixture in vLLM on a CPU, computed with their plain weights.

vLLM rearranges experts for its own CPU kernel once, after it has loaded a folder. The weights of a
later sync would not be rearranged, and the kernel would compute with the wrong ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def keep_plain_experts(experts: Any, layer: Any) -> None:
    """Stand-in for process_weights_after_loading of vLLM's experts: nothing is rearranged, and
    `_apply` computes with the weights as they were loaded."""
    experts.apply = functools.partial(_apply, experts)


def _apply(
    experts: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """Write the sum of each token's experts into output (n, H), with the arguments of vLLM.

    hidden_states (n, H); w1 (E, 2 F, H), w2 (E, H, F), with biases of `experts`, if there are any.
    topk_weights and topk_ids (n, k). apply_router_weight_on_input: hidden_states are multiplied by
    the weights already.
    """
    activate = _ACTIVATIONS[str(activation.value).lower()]
    if expert_map is not None:
        topk_ids = expert_map[topk_ids]
    output.zero_()
    for expert in range(len(w1)):
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        bias1 = None if experts.w1_bias is None else experts.w1_bias[expert]
        bias2 = None if experts.w2_bias is None else experts.w2_bias[expert]
        inner = activate(functional.linear(hidden_states[tokens], w1[expert], bias1))
        result = functional.linear(inner, w2[expert], bias2)
        if not apply_router_weight_on_input:
            result = result * topk_weights[tokens, slots, None]
        output.index_add_(0, tokens, result.to(output.dtype))


def _multiply_by_gate(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """(n, 2 F) -> (n, F): function(first half) times the second half."""

    def activate(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    return activate


def _clamped_swiglu(x: Tensor) -> Tensor:
    """The activation of gpt-oss: (n, 2 F), in which gate and up alternate, -> (n, F)."""
    gate = x[..., ::2].clamp(max=7.0)
    up = x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _multiply_by_gate(functional.silu),
    "gelu": _multiply_by_gate(functional.gelu),
    "gelu_tanh": _multiply_by_gate(functools.partial(functional.gelu, approximate="tanh")),
    "swigluoai": _clamped_swiglu,
}
