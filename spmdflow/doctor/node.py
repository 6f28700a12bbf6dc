"""This node: torch and its devices, addresses, the folder of runs, limits, variables."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from spmdflow.doctor import BAD, GOOD, WARNING, Check

_MIB, _GIB = 1 << 20, 1 << 30
_SHARED = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "cifs", "smb", "wekafs", "afs")
"""How names of file systems begin that several nodes see."""
_UNSURE = ("fuse", "9p", "virtiofs")
_NO_ROUTE = "192.0.2.1"
"""An address of documentation (RFC 5737): asked for the way to it, nothing is sent."""
_FEW_FILES, _LITTLE_SHM, _LITTLE_DISK = 1024, _GIB, 5 * _GIB


def check_addresses() -> list[Check]:
    """Whether a port can be bound on loopback and on the address that other nodes would use."""
    checks = [_check_port("loopback", "127.0.0.1", BAD)]
    host = socket.gethostname()
    try:
        named = socket.gethostbyname(host)
    except OSError as err:
        advice = "torchrun --local-addr ADDRESS, or name it in /etc/hosts"
        checks.append(Check("ports", "host name", WARNING, f"{host} has no address: {err}", advice))
        named = ""
    outside = _outside_address()
    if named.startswith("127."):
        advice = "for several nodes: torchrun --local-addr ADDRESS and GLOO_SOCKET_IFNAME=INTERFACE"
        checks.append(Check("ports", "host name", WARNING, f"{host} means {named}", advice))
    if outside is None:
        advice = "needed for several nodes only"
        checks.append(Check("ports", "network", WARNING, "no route to other nodes", advice))
    for address in dict.fromkeys(item for item in (named, outside) if item):
        if not address.startswith("127."):
            checks.append(_check_port("network", address, WARNING))
    return checks


def _outside_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_NO_ROUTE, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def _check_port(name: str, address: str, otherwise: str) -> Check:
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout=5):
                return Check("ports", name, GOOD, f"{address}: port {port} bound and reached")
    except OSError as err:
        advice = "ranks could not meet there; look at firewalls and at limits on sockets"
        return Check("ports", name, otherwise, f"{address}: {err}", advice)


def check_run_dir(folder: Path) -> list[Check]:
    """Whether runs can be written below `folder`, how much fits, and which nodes see it."""
    existing = folder.absolute()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".spmdflow-doctor-"):
            checks = [Check("run.dir", "writable", GOOD, str(folder.absolute()))]
    except OSError as err:
        advice = "set run.dir to a folder that you may write"
        return [Check("run.dir", "writable", BAD, f"{folder.absolute()}: {err.strerror}", advice)]
    free = shutil.disk_usage(existing).free
    state = GOOD if free >= _LITTLE_DISK else WARNING
    advice = "" if state == GOOD else "a checkpoint holds parameters and two moments of each model"
    checks.append(Check("run.dir", "free", state, f"{free / _GIB:.1f} GiB", advice))
    kind = file_system(existing)
    if kind.startswith(_SHARED):
        checks.append(Check("run.dir", "file system", GOOD, f"{kind}, which nodes can share"))
    else:
        unsure = "may or may not be shared" if kind.startswith(_UNSURE) else "looks node-local"
        advice = "fine on one node; runs over several nodes need a folder that all of them see"
        checks.append(Check("run.dir", "file system", GOOD, f"{kind}, which {unsure}", advice))
    return checks


def file_system(folder: Path) -> str:
    """The type of the file system that holds a folder, such as ext4; unknown if Linux hides it."""
    best, kind = -1, "unknown"
    for line in _text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].replace("\\040", " "))
        depth = len(mount.parts)
        if depth >= best and (mount == folder or mount in folder.parents):
            best, kind = depth, right.split()[0]
    return kind


def check_system() -> Check:
    """Whether this is Linux, whose epoll, signals and /proc every rank uses."""
    system = platform.system()
    state, advice = (GOOD, "") if system == "Linux" else (BAD, "use Linux, or a container")
    return Check("node", "system", state, f"{system} {platform.release()}", advice)


def check_limits() -> list[Check]:
    """Open files, locked memory, shared memory, threads, memory."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    state = GOOD if _is_infinite(files) or files >= _FEW_FILES else WARNING
    advice = "" if state == GOOD else f"ulimit -n {_FEW_FILES} or more"
    checks = [Check("limits", "open files", state, _plain(files), advice)]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if _is_infinite(locked) else f"{locked / _MIB:.0f} MiB"
    advice = "" if _is_infinite(locked) else "InfiniBand wants ulimit -l unlimited; nothing else"
    checks.append(Check("limits", "locked memory", GOOD, text, advice))
    checks.append(_check_shared_memory())
    threads = [resource.getrlimit(resource.RLIMIT_NPROC)[0], _cgroup("pids.max")]
    fewest = min((number for number in threads if not _is_infinite(number)), default=-1)
    checks.append(Check("limits", "threads", GOOD, _plain(fewest)))
    checks.append(_check_memory())
    return checks


def _check_shared_memory() -> Check:
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        advice = "vLLM and NCCL need it; docker run --shm-size=8g"
        return Check("limits", "/dev/shm", WARNING, "not there", advice)
    state = GOOD if total >= _LITTLE_SHM else WARNING
    advice = "" if state == GOOD else "vLLM and NCCL may need more; docker run --shm-size=8g"
    return Check("limits", "/dev/shm", state, f"{total / _GIB:.2f} GiB", advice)


def _check_memory() -> Check:
    lines = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
    available = int(lines.get("MemAvailable", "0 kB").split()[0]) * 1024
    text = f"{available / _GIB:.1f} GiB available"
    limit = _cgroup("memory.max")
    if not _is_infinite(limit):
        text += f", cgroup limit {limit / _GIB:.1f} GiB"
    return Check("limits", "memory", GOOD, text)


def check_environment(variables: Mapping[str, str]) -> list[Check]:
    """Variables that change how a run behaves; `variables` are the process's."""
    threads = variables.get("OMP_NUM_THREADS")
    text = threads or "not set"
    advice = "" if threads else "torchrun sets 1 for several ranks; cores / ranks is best"
    checks = [Check("environment", "OMP_NUM_THREADS", GOOD, text, advice)]
    home = variables.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(variables.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    checks.append(Check("environment", "Hugging Face cache", GOOD, f"{cache}: {models} models"))
    offline = variables.get("HF_HUB_OFFLINE", "0")
    text = "1: nothing is downloaded" if offline not in ("", "0") else "not set"
    checks.append(Check("environment", "HF_HUB_OFFLINE", GOOD, text))
    secret = "set" if variables.get("SPMDFLOW_SECRET") else "not set"
    advice = "" if secret == "set" else "needed where the network between nodes is not trusted"
    return [*checks, Check("environment", "SPMDFLOW_SECRET", GOOD, secret, advice)]


def _cgroup(name: str) -> int:
    """The lowest limit of this name from this process's cgroup upwards; -1: none."""
    path = next(
        (line[3:] for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::")),
        "/",
    )
    folder = Path("/sys/fs/cgroup") / path.strip("/")
    folders = [folder, *folder.parents]
    values = [_text(item / name).strip() for item in folders if "cgroup" in item.parts]
    return min((int(value) for value in values if value.isdigit()), default=-1)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_infinite(number: int) -> bool:
    return number in (-1, resource.RLIM_INFINITY)


def _plain(number: int) -> str:
    return "unlimited" if _is_infinite(number) else str(number)


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
