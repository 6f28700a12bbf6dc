"""Stands for TransformerEngine where no GPU is: what Megatron-Core imports of it, in plain torch.

The classes of `layers` compute; names that Megatron only imports (fp8, MoE, graphs) raise an error
when they are called. On PYTHONPATH with this folder's parent, Megatron takes it for the real one.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from transformer_engine import layers

__version__ = "2.9.0"
"""Whose behaviour is imitated, and which branches of Megatron run."""


class Absent:
    """A class that Megatron derives from or annotates with, and does not use here."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}: TransformerEngine's stand-in has none")


class FP8GlobalStateManager:
    """Nothing is quantised."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


class CudaRNGStatesTracker(Absent):
    """Megatron's tracker of random states is used instead."""


def get_cpu_offload_context(enabled: bool, *arguments: Any) -> tuple[Any, None]:
    """Activations stay where they are."""
    assert not enabled
    return nullcontext(), None


def _module(name: str, *absent: str, **names: Any) -> ModuleType:
    """`transformer_engine.name` in sys.modules and in its parent; absent: classes without use."""
    path = f"{__name__}.{name}"
    module = ModuleType(path)
    made = {each: type(each, (Absent,), {}) for each in absent}
    module.__dict__.update(names, __path__=[], **made)
    parent, _, last = path.rpartition(".")
    sys.modules[path] = module
    setattr(sys.modules[parent], last, module)
    return module


_module("common")
_module("common.recipe", "DelayedScaling")
_module(
    "pytorch",
    *("LayerNorm", "GroupedLinear", "Fp8Padding", "Fp8Unpadding"),
    Linear=layers.Linear,
    LayerNormLinear=layers.LayerNormLinear,
    RMSNorm=layers.RMSNorm,
    DotProductAttention=layers.DotProductAttention,
)
_module("pytorch.ops", "Sequential", "FusibleOperation")
_module("pytorch.fp8", "fp8_autocast", FP8GlobalStateManager=FP8GlobalStateManager)
_module(
    "pytorch.distributed",
    *("checkpoint", "activation_recompute_forward", "get_all_rng_states"),
    CudaRNGStatesTracker=CudaRNGStatesTracker,
)
_module("pytorch.cpu_offload", get_cpu_offload_context=get_cpu_offload_context)
_module("pytorch.tensor", "QuantizedTensor")
_module(
    "pytorch.router",
    *("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"),
    "fused_topk_with_score_function",
)
_module(
    "pytorch.optimizers",
    *("FusedSGD", "multi_tensor_applier", "multi_tensor_scale", "multi_tensor_l2norm"),
    FusedAdam=layers.FusedAdam,
)
