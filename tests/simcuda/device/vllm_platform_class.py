"""The platform itself; apart from the plug-in, as it needs vLLM's classes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import NonNvmlCudaPlatform


class TritonConfig:
    """Sizes of a kernel that is not compiled."""

    def __init__(self, kwargs: Any, num_warps: int = 4, num_stages: int = 3, **others: Any) -> None:
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages


def apply_experts(
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *_: Any,
    **__: Any,
) -> None:
    """vLLM's Triton kernel for experts, with its arguments, without waiting for the device: every
    expert computes every token, with weight 0 where the token has not chosen it."""
    assert str(activation.value).lower() == "silu", "not simulated"
    if expert_map is not None:
        topk_ids = expert_map[topk_ids.long()]
    total = torch.zeros_like(output)
    for expert in range(len(w1)):
        weight = (topk_weights * (topk_ids == expert)).sum(-1, keepdim=True)
        gate, up = functional.linear(hidden_states, w1[expert]).chunk(2, -1)
        result = functional.linear(functional.silu(gate) * up, w2[expert])
        total += (weight * result).to(total.dtype)
    output.copy_(total)


class SimulatedCudaPlatform(NonNvmlCudaPlatform):
    """CUDA without NVML, compiled code, graphs and communicators of vLLM's own."""

    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        from vllm.triton_utils import triton

        triton.Config = TritonConfig
        CpuPlatform.import_kernels()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        CpuPlatform.register_triton_kernel_overrides()

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        from vllm.config import CompilationMode, CUDAGraphMode
        from vllm.model_executor.layers.fused_moe.experts import triton_moe

        triton_moe.TritonExperts.apply = apply_experts
        super().check_and_update_config(vllm_config)
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []

    @classmethod
    def get_attn_backend_cls(cls, *arguments: Any, **named: Any) -> str:
        return CpuPlatform.get_attn_backend_cls(*arguments, **named)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        folder = "vllm.distributed.device_communicators.base_device_communicator"
        return f"{folder}.DeviceCommunicatorBase"

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        return False

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:
        return super(NonNvmlCudaPlatform.__mro__[1], cls).get_default_ir_op_priority(vllm_config)
