"""Device memory of vLLM at any size by vLLM's own code, without weights or other ranks.

    python tests/simcuda/programs/vllm_memory.py NAME:T ...      prints one line of JSON a case

Runs on the simulated device with fake tensors, as `traced_memory` does: vLLM's model is built as
rank 0 of T tensor-parallel ranks, says what KV cache its layers need, and runs the forward pass of
vLLM's profile run; then the project's sampler draws. CUDA graphs are not captured: what they take
is measured by vLLM on a device, and by no formula of its.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from spmdflow.kind.generator import PREFILL_TOKENS
from spmdflow.rollout.sampling import Sampling, draw
from tests.simcuda.memory_cases import LENGTH, ROWS, SHAPES
from tests.simcuda.programs.ledger import Ledger
from tests.simcuda.programs.traced_memory import DEVICE, write_config

_KERNELS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")
"""Those of vLLM's custom kernels that write into what they are given and make nothing."""


def group_of(size: int) -> Any:
    """vLLM's coordinator as rank 0 of so many ranks that all have the same."""
    return SimpleNamespace(
        world_size=size,
        rank_in_group=0,
        is_first_rank=True,
        is_last_rank=size == 1,
        all_reduce=torch.empty_like,
        all_gather=lambda x, dim: x.repeat(*(1,) * (x.dim() - 1), size),
    )


def config_of(folder: Path, size: int) -> Any:
    """vLLM's settings as `rollout.vllm_engine` makes them."""
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        max_num_seqs=ROWS,
        max_model_len=LENGTH,
        max_num_batched_tokens=PREFILL_TOKENS,
        tensor_parallel_size=size,
        distributed_executor_backend="external_launcher",
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="dummy",
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBNHC"  # flash-attention's
    kernels = IrOpPriorityConfig.with_default(["vllm_c"], gelu_and_mul_sparse=["native"])
    kernels.set_default()  # as on CUDA without compiled code
    return config


def measure(name: str, size: int) -> dict[str, Any]:
    """Bytes of weights, of the cache of a token and of a whole sequence, at the peak of the pass
    and of a draw."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found: dict[str, Any] = {"case": f"{name}:{size}"}
    ledger = Ledger()
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        config = config_of(Path(folder), size)
    with (
        mock.patch.object(parallel_state, "_TP", group_of(size)),
        mock.patch.object(parallel_state, "_PP", group_of(1)),
        set_current_vllm_config(config),
        FakeTensorMode(allow_non_fake_inputs=True),
        ledger,
    ):
        with set_default_torch_dtype(torch.bfloat16), DEVICE:
            model = LlamaForCausalLM(vllm_config=config)
        found["weights"] = sum(x.untyped_storage().nbytes() for x in model.parameters())
        runner: Any = SimpleNamespace(vllm_config=config, shared_kv_cache_layers={})
        specs = GPUModelRunner.get_kv_cache_spec(runner)
        groups = kv_cache_utils.get_kv_cache_groups(config, specs)
        pages = kv_cache_utils._pool_bytes_per_block(config, groups)
        found["token"] = pages / groups[0].kv_cache_spec.block_size
        found["sequence"] = kv_cache_utils.max_memory_usage_bytes(config, specs.values())
        ids = torch.zeros(PREFILL_TOKENS, dtype=torch.int64, device=DEVICE)
        ledger.begin()
        held = ledger.now
        with torch.no_grad(), set_forward_context(None, config, num_tokens=PREFILL_TOKENS):
            hidden = model(ids, ids)
            found["pass"] = ledger.peak - held
            ledger.begin()
            held = ledger.now
            logits = model.compute_logits(hidden[:ROWS])
            assert logits.shape == (ROWS, shape.vocab_size), logits.shape
            draw(logits, Sampling(max_new_tokens=1), ids[:ROWS], ids[:ROWS])
            found["draw"] = ledger.peak - held
    return found


def defaults_of(memory_bytes: int, name: str) -> int:
    """Tokens of a pass that vLLM chooses by itself for a device."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    with (
        mock.patch.object(
            type(current_platform), "get_device_total_memory", lambda *_: memory_bytes
        ),
        mock.patch.object(type(current_platform), "get_device_name", lambda *_: name),
    ):
        return EngineArgs.get_batch_defaults(1)[0][UsageContext.LLM_CLASS]


def main() -> int:
    """Measure the cases that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    known = fake_impls.op_implementations_dict
    for kernel in _KERNELS:
        if hasattr(torch.ops._C, kernel):
            known[getattr(torch.ops._C, kernel).default] = lambda *_, **__: None
    from vllm import ir

    # as the kernels: one new tensor; none
    ir.ops.rms_norm.register_fake(lambda x, *_, **__: torch.empty_like(x))
    ir.ops.fused_add_rms_norm.register_fake(lambda x, residual, *_, **__: (x, residual))
    for name, size in (each.split(":") for each in parser.parse_args().names):
        print(json.dumps(measure(name, int(size))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
