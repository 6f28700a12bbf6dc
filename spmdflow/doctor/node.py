"""Checks of this node: torch and its devices, addresses, RUN_DIR, limits, environment variables."""

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
from spmdflow.doctor.gpu import check_gpu_node

_MIB = 1 << 20
_GIB = 1 << 30
_SHARED = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "cifs", "smb", "wekafs", "afs")
"""Prefixes of the types of file systems that several nodes can share."""
_UNSURE = ("fuse", "9p", "virtiofs")
_NO_ROUTE = "192.0.2.1"
"""An address reserved for documentation (RFC 5737). Its route is looked up; nothing is sent."""
_FEW_FILES = 1024
_LITTLE_SHM = _GIB
_LITTLE_DISK = 5 * _GIB
_STORE_SECONDS = 5


def check_addresses() -> list[Check]:
    """Check that a port can be bound on loopback and on the addresses that other nodes would use.

    These are the address of the host name and that of the route to other networks, unless they are
    loopback. Only a loopback failure is BAD. A host name without such an address, or no route, is a
    warning, as only several nodes need them.
    """
    checks = [_check_port("loopback", "127.0.0.1", BAD)]
    host = socket.gethostname()
    named = ""
    outside = _outside_address()
    advice = "for several nodes: torchrun --local-addr ADDRESS and GLOO_SOCKET_IFNAME=INTERFACE"
    try:
        named = socket.gethostbyname(host)
        resolution = f"{host} means {named}"
    except OSError as err:
        advice = "torchrun --local-addr ADDRESS, or name it in /etc/hosts"
        resolution = f"{host} has no address: {err}"
    if not named or named.startswith("127."):
        checks.append(Check("ports", "host name", WARNING, resolution, advice))
    if outside is None:
        advice = "needed for several nodes only"
        checks.append(Check("ports", "network", WARNING, "no route to other nodes", advice))
    for address in dict.fromkeys(item for item in (named, outside) if item):
        if not address.startswith("127."):
            checks.append(_check_port("network", address, WARNING))
    return checks


def _outside_address() -> str | None:
    """Return this node's address on its route to other networks; None if it has no such route.

    The route is looked up with a UDP socket. Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_NO_ROUTE, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def _check_port(name: str, address: str, otherwise: str) -> Check:
    """Check that some free port of the address can be bound and connected to within five seconds.

    otherwise: the state if it cannot.
    """
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout=5):
                return Check("ports", name, GOOD, f"{address}: port {port} bound and reached")
    except OSError as err:
        advice = "ranks could not meet there; look at firewalls and at limits on sockets"
        return Check("ports", name, otherwise, f"{address}: {err}", advice)


def check_run_dir(folder: Path) -> list[Check]:
    """Check that `folder` is writable, its free space, and whether several nodes can share it.

    If it does not exist, its nearest parent that exists is checked, by creating and removing a
    file. Not writable is BAD, and then the only line. Less than 5 GiB free is a warning. The file
    system's type says whether nodes can share it, such as nfs or lustre.
    """
    wanted = folder.absolute()
    existing = next(parent for parent in (wanted, *wanted.parents) if parent.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".spmdflow-doctor-"):
            pass
    except OSError as err:
        advice = "set run.dir to a folder that you may write"
        return [Check("run.dir", "writable", BAD, f"{wanted}: {err.strerror}", advice)]
    free = shutil.disk_usage(existing).free
    kind = file_system(existing)
    little = "a checkpoint holds parameters and two moments of each model"
    if kind.startswith(_UNSURE):
        unsure = "may or may not be shared"
    else:
        unsure = "looks node-local"
    if kind.startswith(_SHARED):
        shared = "which nodes can share"
    else:
        shared = f"which {unsure}"
    local = "fine on one node; runs over several nodes need a folder that all of them see"
    is_shared = kind.startswith(_SHARED)
    return [
        Check("run.dir", "writable", GOOD, str(wanted)),
        Check.of("run.dir", "free", f"{free / _GIB:.1f} GiB", free >= _LITTLE_DISK, little),
        Check.of("run.dir", "file system", f"{kind}, {shared}", is_shared, local, GOOD),
    ]


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system, such as ext4; "unknown" if no mount is listed.

    The deepest mount point in /proc/self/mountinfo that contains the folder counts, of equal ones
    the last.
    """
    best = -1
    kind = "unknown"
    for line in _read_or_empty("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].replace("\\040", " "))
        depth = len(mount.parts)
        if depth >= best and (mount == folder or mount in folder.parents):
            best = depth
            kind = right.split()[0]
    return kind


def check_system() -> Check:
    """Check that this is Linux, otherwise BAD. Every rank uses its epoll, signals and /proc."""
    system = platform.system()
    advice = "use Linux, or a container"
    system_version = f"{system} {platform.release()}"
    return Check.of("node", "system", system_version, system == "Linux", advice, BAD)


def check_limits() -> list[Check]:
    """Check limits of this process: open files, locked memory, shared memory, threads and memory.

    Fewer than 1024 open files and a /dev/shm below 1 GiB are warnings; the others only inform. The
    limit of threads is the lower one of ulimit -u and of the cgroup.
    """
    files, locked, processes = (
        resource.getrlimit(kind)[0]
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC)
    )
    enough = _is_infinite(files) or files >= _FEW_FILES
    unlocked = "unlimited" if _is_infinite(locked) else f"{locked / _MIB:.0f} MiB"
    lock_advice = "InfiniBand wants ulimit -l unlimited; nothing else"
    threads = []
    for number in (processes, _cgroup_limit("pids.max")):
        if not _is_infinite(number):
            threads.append(number)
    return [
        Check.of(
            "limits", "open files", _limit_text(files), enough, f"ulimit -n {_FEW_FILES} or more"
        ),
        Check.of("limits", "locked memory", unlocked, _is_infinite(locked), lock_advice, GOOD),
        _check_shared_memory(),
        Check("limits", "threads", GOOD, _limit_text(min(threads, default=-1))),
        _check_memory(),
    ]


def _check_shared_memory() -> Check:
    """Return a line with the size of /dev/shm; a warning if it is absent or smaller than 1 GiB."""
    advice = "vLLM and NCCL may need more; docker run --shm-size=8g"
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Check("limits", "/dev/shm", WARNING, "not there", advice)
    size = f"{total / _GIB:.2f} GiB"
    return Check.of("limits", "/dev/shm", size, total >= _LITTLE_SHM, advice)


def _check_memory() -> Check:
    """Return a line with the available memory, and the cgroup's limit if there is one.

    It is never a warning.
    """
    lines = dict(line.split(":", 1) for line in _read_or_empty("/proc/meminfo").splitlines())
    available = int(lines.get("MemAvailable", "0 kB").split()[0]) * 1024
    text = f"{available / _GIB:.1f} GiB available"
    limit = _cgroup_limit("memory.max")
    if not _is_infinite(limit):
        text += f", cgroup limit {limit / _GIB:.1f} GiB"
    return Check("limits", "memory", GOOD, text)


def check_environment(variables: Mapping[str, str]) -> list[Check]:
    """Return lines about environment variables that change how a run behaves. None is a warning.

    They are OMP_NUM_THREADS, the Hugging Face cache and the models in it, HF_HUB_OFFLINE, and
    whether SPMDFLOW_SECRET is set (not its value). variables: such as os.environ.
    """
    threads, secret = (variables.get(name) for name in ("OMP_NUM_THREADS", "SPMDFLOW_SECRET"))
    home = variables.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(variables.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    is_offline = variables.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    few = "torchrun sets 1 for several ranks; cores / ranks is best"
    bare = "needed where others can read RUN_DIR as you can"
    topic = "environment"
    unset = "not set"
    return [
        Check.of(topic, "OMP_NUM_THREADS", threads or unset, bool(threads), few, GOOD),
        Check(topic, "Hugging Face cache", GOOD, f"{cache}: {models} models"),
        Check(topic, "HF_HUB_OFFLINE", GOOD, "1: nothing is downloaded" if is_offline else unset),
        Check.of(topic, "SPMDFLOW_SECRET", "set" if secret else unset, bool(secret), bare, GOOD),
    ]


def _cgroup_limit(name: str) -> int:
    """Return the lowest limit of this name in this process's cgroup and its parents; -1: none.

    Reads cgroup version 2 files such as memory.max; "max" is no limit.
    """
    path = next(
        (
            line[3:]
            for line in _read_or_empty("/proc/self/cgroup").splitlines()
            if line.startswith("0::")
        ),
        "/",
    )
    folder = Path("/sys/fs/cgroup") / path.strip("/")
    folders = [folder, *folder.parents]
    values = []
    for item in folders:
        if "cgroup" in item.parts:
            values.append(_read_or_empty(item / name).strip())
    return min((int(value) for value in values if value.isdigit()), default=-1)


def _read_or_empty(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_infinite(number: int) -> bool:
    return number in (-1, resource.RLIM_INFINITY)


def _limit_text(number: int) -> str:
    if _is_infinite(number):
        return "unlimited"
    return str(number)


def check_devices(root: Path, path: str) -> list[Check]:
    """Check torch's build, cores, GPUs, communication backends, a TCPStore, and what GPUs need.

    If torch cannot be imported, one BAD line is returned. root, path: see `check_gpu_node`.
    """
    try:
        torch: Any = import_module("torch")
        dist: Any = import_module("torch.distributed")
    except Exception as err:  # a broken torch raises anything while it is imported
        return [Check("devices", "torch", BAD, f"cannot be imported: {err}", "pip install torch")]
    cuda = torch.version.cuda or torch.version.hip
    build = f"built for {cuda}" if cuda else "built for CPUs only"
    usable = getattr(os, "sched_getaffinity", None)  # containers often have fewer than the node
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    return [
        Check("devices", "torch", GOOD, f"{torch.__version__}, {build}"),
        Check("devices", "cores", GOOD, f"{cores} for this process"),
        _check_gpus(torch, cuda),
        *_check_backends(dist, own=torch.accelerator.current_accelerator()),
        _check_store(dist),
        *check_gpu_node(root, path, torch.version.cuda),
    ]


def _check_gpus(torch: Any, cuda: str | None) -> Check:
    """Return a line with the number, name and memory of the GPUs that torch sees.

    It is a warning if torch was built for GPUs and sees none. cuda: the version of CUDA or ROCm
    that torch was built for; None: for CPUs only.
    """
    if torch.accelerator.is_available():
        count = torch.accelerator.device_count()
        kind = torch.accelerator.current_accelerator()
        facts = torch.get_device_module(kind).get_device_properties(0)
        text = f"{count} x {facts.name}, {facts.total_memory / _GIB:.0f} GiB each"
        return Check("devices", "GPUs", GOOD, text)
    if cuda is None:
        return Check("devices", "GPUs", GOOD, "none used: this torch runs on the CPU")
    advice = "runs use the CPU; nvidia-smi says whether the driver sees a GPU"
    return Check("devices", "GPUs", WARNING, f"none found by a torch for {cuda}", advice)


def _check_backends(dist: Any, *, own: Any) -> list[Check]:
    """Check that torch has gloo and the default backend of the accelerator `own`, if there is one.

    A missing backend is BAD, and so is a torch without torch.distributed, which is then the only
    line.
    """
    if not dist.is_available():
        advice = "install a torch that was built with it"
        return [Check("devices", "distributed", BAD, "torch has no torch.distributed", advice)]
    backends = [("gloo", dist.is_gloo_available(), "install one that has it")]
    if own is not None:
        name = dist.get_default_backend_for_device(own)
        backends.append((name, dist.is_backend_available(name), f"install one for {own.type}"))
    return [
        Check.of("devices", name, "available" if there else "not in this torch", there, advice, BAD)
        for name, there, advice in backends
    ]


def _check_store(dist: Any) -> Check:
    """Check that a TCPStore on loopback returns what was set; BAD if it does not.

    torchrun --standalone uses one to connect the ranks.
    """
    try:
        limit = timedelta(seconds=_STORE_SECONDS)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
        store.set("doctor", "here")
        assert store.get("doctor") == b"here"
    except (RuntimeError, OSError, AttributeError) as err:
        advice = "ranks cannot meet; look at firewalls and at limits on sockets"
        return Check("devices", "TCPStore", BAD, " ".join(str(err).split())[:200], advice)
    return Check("devices", "TCPStore", GOOD, f"works on 127.0.0.1:{store.port}")
