"""What torch was built for, what it finds, and whether ranks of this node can meet."""

from __future__ import annotations

import os
from datetime import timedelta
from importlib import import_module
from typing import Any

from spmdflow.doctor.check import BAD, GOOD, WARNING, Check

_GIB = 1 << 30
_STORE_SECONDS = 5


def check_devices() -> list[Check]:
    """Torch's build, its devices and backends, and a TCPStore; one BAD line without torch."""
    try:
        torch: Any = import_module("torch")
        dist: Any = import_module("torch.distributed")
    except Exception as err:  # a broken torch raises anything while it is imported
        return [Check("devices", "torch", BAD, f"cannot be imported: {err}", "pip install torch")]
    cuda = torch.version.cuda or torch.version.hip
    build = f"built for {cuda}" if cuda else "built for CPUs only"
    return [
        Check("devices", "torch", GOOD, f"{torch.__version__}, {build}"),
        Check("devices", "cores", GOOD, f"{_cores()} for this process"),
        _check_gpus(torch, cuda),
        *_check_backends(dist, has_gpus=torch.cuda.is_available()),
        _check_store(dist),
    ]


def _cores() -> int:
    """Cores that this process may use; containers often have fewer than the node."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _check_gpus(torch: Any, cuda: str | None) -> Check:
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts = torch.cuda.get_device_properties(0)
        text = f"{count} x {facts.name}, {facts.total_memory / _GIB:.0f} GiB each"
        return Check("devices", "GPUs", GOOD, text)
    if cuda is None:
        return Check("devices", "GPUs", GOOD, "none used: this torch runs on the CPU")
    advice = "runs use the CPU; nvidia-smi says whether the driver sees a GPU"
    return Check("devices", "GPUs", WARNING, f"none found by a torch for {cuda}", advice)


def _check_backends(dist: Any, *, has_gpus: bool) -> list[Check]:
    if not dist.is_available():
        advice = "install a torch that was built with it"
        return [Check("devices", "distributed", BAD, "torch has no torch.distributed", advice)]
    gloo = Check("devices", "gloo", GOOD, "available")
    if not dist.is_gloo_available():
        gloo = Check("devices", "gloo", BAD, "not in this torch", "install one that has it")
    if not has_gpus:
        return [gloo]
    nccl = Check("devices", "nccl", GOOD, "available")
    if not dist.is_nccl_available():
        nccl = Check("devices", "nccl", BAD, "not in this torch", "install one for CUDA")
    return [gloo, nccl]


def _check_store(dist: Any) -> Check:
    """Ranks of a node meet at a TCPStore on loopback, as torchrun --standalone starts it."""
    try:
        limit = timedelta(seconds=_STORE_SECONDS)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
        store.set("doctor", "here")
        assert store.get("doctor") == b"here"
    except (RuntimeError, OSError, AttributeError) as err:
        advice = "ranks cannot meet; look at firewalls and at limits on sockets"
        return Check("devices", "TCPStore", BAD, " ".join(str(err).split())[:200], advice)
    return Check("devices", "TCPStore", GOOD, f"works on 127.0.0.1:{store.port}")
