"""`spmdflow doctor` on a node with GPUs. A folder stands for its /sys, /proc, /usr and /etc."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdflow.doctor import GOOD, WARNING, Check
from spmdflow.doctor.gpu import check_driver, check_gpu_node, check_network, driver_version

CUDA = "13.0"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n"
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.288.01  Thu Nov 13 2025\n"
NODE = {
    "sys/module/nvidia/version": "580.159\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    "usr/lib/x86_64-linux-gnu/libibverbs.so.1": "",
    "etc/libibverbs.d/mlx5.driver": "driver mlx5\n",
    "dev/infiniband/uverbs0": "",
}
"""A node on which NCCL can use InfiniBand."""


def node(root: Path, files: dict[str, str]) -> Path:
    """A root folder with these files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def program(root: Path, name: str) -> None:
    """An executable of that name, in the folder for programs."""
    file = node(root, {f"bin/{name}": "#!/bin/sh\n"}) / "bin" / name
    file.chmod(0o755)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("sys/module/nvidia/version", "580.159\n", "580.159"),
        ("proc/driver/nvidia/version", OPEN_MODULE, "580.159.03"),
        ("proc/driver/nvidia/version", CLOSED_MODULE, "535.288.01"),
        ("proc/driver/nvidia/version", "something else\n", None),
    ],
)
def test_version_of_the_driver_is_read_from_the_kernel(
    file: str, text: str, expected: str | None, tmp_path: Path
) -> None:
    assert driver_version(node(tmp_path, {file: text})) == expected


@pytest.mark.parametrize(
    ("driver", "cuda", "state", "words"),
    [
        ("580.65.06", "13.0", GOOD, "580.65.06; torch for CUDA 13.0 needs 580 or newer"),
        ("610.10", "13.2", GOOD, "610.10"),
        ("575.57", "13.0", WARNING, "575.57 is too old: torch for CUDA 13.0 needs 580 or newer"),
        ("535.288", "12.8", GOOD, "needs 525 or newer"),
        ("", "13.0", WARNING, "no NVIDIA driver is loaded; torch for CUDA 13.0 needs 580 or newer"),
    ],
)
def test_driver_that_is_too_old_or_absent_is_a_warning_with_the_one_that_is_needed(
    driver: str, cuda: str, state: str, words: str, tmp_path: Path
) -> None:
    check = check_driver(node(tmp_path, {"sys/module/nvidia/version": driver}), cuda)

    assert check.state == state
    assert words in check.result
    assert bool(check.advice) is (state == WARNING)


def test_compilers_are_found_on_the_path_and_in_the_folder_of_the_toolkit(tmp_path: Path) -> None:
    for name in ("ninja", "gcc"):
        program(tmp_path, name)
    toolkit = node(tmp_path, {"usr/local/cuda/bin/nvcc": ""}) / "usr/local/cuda/bin/nvcc"
    toolkit.chmod(0o755)

    checks = by_name(check_gpu_node(tmp_path, f"{tmp_path}/bin:/nowhere", CUDA))

    assert checks["nvcc"].result == str(toolkit)
    assert checks["ninja"].result == f"{tmp_path}/bin/ninja"
    assert checks["C compiler"].state == GOOD


def test_missing_compilers_are_reported_with_what_needs_them(tmp_path: Path) -> None:
    checks = by_name(check_gpu_node(tmp_path, f"{tmp_path}/bin", CUDA))

    for name in ("nvcc", "ninja"):
        assert (checks[name].state, checks[name].result) == (GOOD, "not found")
        assert "FlashInfer" in checks[name].advice
    assert "TransformerEngine" in checks["ninja"].advice
    assert checks["C compiler"].state == WARNING
    assert "Triton" in checks["C compiler"].advice


def test_node_without_cards_uses_sockets_and_that_is_no_warning(tmp_path: Path) -> None:
    check = check_network(tmp_path)

    assert (check.state, check.result) == (GOOD, "no InfiniBand or RoCE card: sockets")
    assert "fine on one node" in check.advice


def test_complete_node_can_use_infiniband(tmp_path: Path) -> None:
    check = check_network(node(tmp_path, NODE))

    assert check.state == GOOD
    assert check.result == "mlx5_0, mlx5_1: NCCL can use InfiniBand or RoCE"


@pytest.mark.parametrize(
    ("missing", "problem", "do"),
    [
        ("mlx5_0/ports/1/state", "no port is active", "ibstat"),
        ("libibverbs.so.1", "libibverbs is not installed", "apt-get install libibverbs1 "),
        ("mlx5.driver", "no provider of libibverbs", "apt-get install ibverbs-providers"),
        ("uverbs0", "/dev/infiniband/uverbs* is missing", "docker run --device /dev/infiniband"),
    ],
)
def test_card_that_nccl_cannot_use_is_a_warning_with_what_to_install(
    missing: str, problem: str, do: str, tmp_path: Path
) -> None:
    files = {name: text for name, text in NODE.items() if not name.endswith(missing)}

    check = check_network(node(tmp_path, files))

    assert check.state == WARNING
    assert problem in check.result
    assert "NCCL falls back to sockets" in check.result
    assert do in check.advice


def test_torch_for_cpus_needs_nothing_of_this(tmp_path: Path) -> None:
    (check,) = check_gpu_node(node(tmp_path, NODE), "", None)

    assert check.state == GOOD
    assert check.result == "580.159, not used: this torch was built without CUDA"
