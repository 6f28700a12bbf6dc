"""Checks of what GPUs need from this node: NVIDIA's driver, compilers, and NCCL's network.

Everything is read from files below a root folder and from a search path, so it needs no GPU and no
torch. NVIDIA's driver is what /sys and /proc say; nvidia-smi is not asked.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from spmdflow.doctor import GOOD, WARNING, Check

_TOPIC = "gpu"
_DRIVER_OF_CUDA = {12: 525, 13: 580}
"""First driver branch that runs programs built for a major version of CUDA (release notes)."""
_DRIVER = re.compile(r"\b(\d{3,})\.(\d+(?:\.\d+)?)\b")
_LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/lib",
    "usr/local/lib",
)
_SAMPLER = "for the sampler of FlashInfer if vLLM is to draw with it"
_SOCKETS = "NCCL falls back to sockets between nodes, about ten times slower"


def check_gpu_node(root: Path, path: str, cuda: str | None) -> list[Check]:
    """Check driver, compilers and NCCL's network of a node.

    root: "/", or a folder with a copy of /sys, /proc, /dev, /usr and /etc. path: folders with
    programs, as in PATH. cuda: the version of CUDA that torch was built for, such as 13.0; None if
    it was built without CUDA. Nothing here is needed then, so nothing is a warning.
    """
    if cuda is None:
        return [Check(_TOPIC, "driver", GOOD, _without_cuda(driver_version(root)))]
    return [
        check_driver(root, cuda),
        _check_program("nvcc", _find(("nvcc",), root, path), _SAMPLER, GOOD),
        _check_program(
            "ninja",
            _find(("ninja",), root, path),
            f"to build TransformerEngine, and {_SAMPLER}",
            GOOD,
        ),
        _check_program(
            "C compiler",
            _find(("gcc", "clang", "cc"), root, path),
            "for Triton, which starts the kernels of vLLM and torch.compile with it; "
            "apt-get install g++ python3-dev",
            WARNING,
        ),
        check_network(root),
    ]


def _without_cuda(driver: str | None) -> str:
    if driver is None:
        return "none, and this torch needs none"
    return f"{driver}, not used: this torch was built without CUDA"


def driver_version(root: Path) -> str | None:
    """Return the version of NVIDIA's kernel module, such as 580.159; None if it is not loaded."""
    for file in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        match = _DRIVER.search(_read_or_empty(root / file))
        if match:
            return match[0]
    return None


def check_driver(root: Path, cuda: str) -> Check:
    """Check that NVIDIA's driver is loaded, and new enough for this version of CUDA."""
    driver = driver_version(root)
    major = int(cuda.split(".")[0])
    needed = _DRIVER_OF_CUDA.get(major, max(_DRIVER_OF_CUDA.values()))
    wanted = f"torch for CUDA {cuda} needs {needed} or newer"
    if driver is None:
        advice = (
            "without a GPU: nothing to do; with one: install the driver on the host, and start "
        )
        advice += "containers with docker run --gpus all"
        return Check(_TOPIC, "driver", WARNING, f"no NVIDIA driver is loaded; {wanted}", advice)
    if int(driver.split(".")[0]) < needed:
        advice = (
            f"ask the administrator of this node for driver {needed} or newer; runs use the CPU"
        )
        return Check(_TOPIC, "driver", WARNING, f"{driver} is too old: {wanted}", advice)
    return Check(_TOPIC, "driver", GOOD, f"{driver}; {wanted}")


def _find(names: Iterable[str], root: Path, path: str) -> str | None:
    """The first of these programs on the path, or in the CUDA toolkit's usual folder."""
    folders = [*filter(None, path.split(":")), str(root / "usr/local/cuda/bin")]
    for name in names:
        program = shutil.which(name, path=":".join(folders))
        if program:
            return program
    return None


def _check_program(name: str, program: str | None, purpose: str, otherwise: str) -> Check:
    """A line with the place of a program. otherwise: the state if it is missing."""
    if program is None:
        return Check(_TOPIC, name, otherwise, "not found", f"needed {purpose}")
    return Check(_TOPIC, name, GOOD, program)


def check_network(root: Path) -> Check:
    """Check whether NCCL can use InfiniBand or RoCE between nodes; a warning if only part is there.

    NCCL needs an active port, the library libibverbs with the provider of the card, and the card's
    device files. If one is missing, NCCL uses sockets and reports nothing.
    """
    name = "NCCL network"
    cards = sorted(card.name for card in _entries(root / "sys/class/infiniband"))
    if not cards:
        advice = f"fine on one node; on several, {_SOCKETS}"
        return Check(_TOPIC, name, GOOD, "no InfiniBand or RoCE card: sockets", advice)
    shown = ", ".join(cards)
    for problem, do in (
        _port_problem(root, cards),
        _library_problem(root),
        _provider_problem(root),
        _device_file_problem(root),
    ):
        if problem:
            return Check(_TOPIC, name, WARNING, f"{shown}, but {problem}: {_SOCKETS}", do)
    return Check(_TOPIC, name, GOOD, f"{shown}: NCCL can use InfiniBand or RoCE")


def _port_problem(root: Path, cards: Iterable[str]) -> tuple[str, str]:
    for card in cards:
        for port in _entries(root / "sys/class/infiniband" / card / "ports"):
            if "ACTIVE" in _read_or_empty(port / "state"):
                return "", ""
    return "no port is active", "ibstat shows the ports; ask the administrator of the network"


def _library_problem(root: Path) -> tuple[str, str]:
    for folder in _LIBRARY_FOLDERS:
        if any((root / folder).glob("libibverbs.so*")):
            return "", ""
    do = "apt-get install libibverbs1 ibverbs-providers, or dnf install libibverbs"
    return "libibverbs is not installed", do


def _provider_problem(root: Path) -> tuple[str, str]:
    if any((root / "etc/libibverbs.d").glob("*.driver")):
        return "", ""
    return "no provider of libibverbs is installed", "apt-get install ibverbs-providers"


def _device_file_problem(root: Path) -> tuple[str, str]:
    if any((root / "dev/infiniband").glob("uverbs*")):
        return "", ""
    do = (
        "give the container the cards: docker run --device /dev/infiniband --ulimit memlock=-1, or "
    )
    do += "a pod's rdma resource"
    return "/dev/infiniband/uverbs* is missing", do


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read_or_empty(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
