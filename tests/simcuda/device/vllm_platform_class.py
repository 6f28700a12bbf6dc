"""The platform itself; apart from the plug-in, as it needs vLLM's classes."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import NonNvmlCudaPlatform


class TritonConfig:
    """Sizes of a kernel that is not compiled."""

    def __init__(self, kwargs: Any, num_warps: int = 4, num_stages: int = 3, **others: Any) -> None:
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages


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
