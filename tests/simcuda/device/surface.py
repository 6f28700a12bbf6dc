"""`torch.cuda` and NCCL over the compiled device: `install()` once, right after `import torch`.

Set by the environment: SIMCUDA_DEVICES (8), SIMCUDA_MEMORY (bytes of a device, 80 GiB),
SIMCUDA_LOG (a folder: each rank writes there what it has started and where it has waited),
SIMCUDA_STATE (a folder: a collective that hangs is told by `watchdog`).
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

native: Any = None
"""The compiled module, once installed."""
NAME = "NVIDIA H100 80GB HBM3 (simulated)"
CAPABILITY = (9, 0)


def install(library: str) -> None:
    """Make torch believe in CUDA devices and NCCL."""
    global native
    if native is not None:
        return
    spec = importlib.util.spec_from_file_location("simulated_cuda", library)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    _install_devices()
    _kernels.impl("mm.dtype", _product, "CUDA")
    _kernels.impl("histc", _histogram, "CUDA")
    _kernels.impl("_conv_depthwise2d", _depthwise, "CUDA")
    _install_attention()
    _install_memory()
    _install_streams()
    _install_generators()
    _install_groups()
    _install_batches()
    atexit.register(_wait_for_backward_threads)
    if folder := os.environ.get("SIMCUDA_LOG"):
        import record

        record.listen(folder)


def _wait_for_backward_threads(limit: float = 60) -> None:
    """Wait until no thread of a device's backward pass computes, for `limit` seconds at most.

    Such a thread frees Python objects of its pass after backward() has returned. If Python ends
    meanwhile, torch aborts the process.
    """
    end = time.monotonic() + limit
    time.sleep(0.01)  # releases the GIL: a thread that waits for it can go on
    while _backward_threads_compute() and time.monotonic() < end:
        time.sleep(0.01)


def _backward_threads_compute() -> bool:
    """Whether a thread of a device's backward pass is running or ready to run, by /proc."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            name_and_state = (thread / "stat").read_text().partition("(")[2]
        except OSError:  # the thread has ended
            continue
        name, _, state = name_and_state.rpartition(") ")
        if name.startswith("pt_autograd") and not state.startswith("S"):
            return True
    return False


_FOLDERS = ("/spmdflow/", "/algos/", "/tests/")


def line_of(frame: Any) -> str:
    """file:function of the innermost frame of the project; else of the innermost library's."""
    library = ""
    while frame is not None:
        code = frame.f_code
        *root, path = code.co_filename.split("/site-packages")  # which may lie in the checkout
        for folder in _FOLDERS:
            if folder in path and "/simcuda/device/" not in path:
                return f"{path[path.rfind(folder) + 1 :]}:{code.co_name}"
        if not library and root:
            library = f"{path[1:]}:{code.co_name}"
        frame = frame.f_back
    return library


def _replace(places: list[Any], names: Mapping[str, Any]) -> None:
    for place in places:
        for name, value in names.items():
            setattr(place, name, value)


def index_of(device: Any = None) -> int:
    """The index of a device, a string or a number; of the current device for None and "cuda"."""
    return torch.cuda._utils._get_device_index(device, optional=True)


def synchronize(device: Any = None) -> None:
    """The host waits for all streams of a device."""
    sync("torch.cuda.synchronize", 0)
    native.synchronize(index_of(device))


sync: Callable[[str, int], None] = lambda what, size: None  # noqa: E731
"""Called for each wait of the host for a device, as the compiled module does: what, bytes."""


def _install_devices() -> None:
    def exchange(index: int) -> int:
        before: int = native.current_device()
        if index >= 0:
            native.set_device(index)
        return before

    names = {
        "_cuda_getDeviceCount": native.num_devices,
        "_cuda_getDevice": native.current_device,
        "_cuda_setDevice": native.set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_synchronize": synchronize,
        "_cuda_init": lambda: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_getCurrentBlasHandle": lambda: 0,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 12090,
    }
    _replace([torch._C], names)
    cuda = {
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "_initialized": True,
        "_lazy_init": lambda: None,
        "_cudart": types.SimpleNamespace(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": native.num_devices,
        "get_device_properties": lambda device=None: _properties(index_of(device)),
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "synchronize": synchronize,
    }
    _replace([torch.cuda], cuda)
    accelerator = {"device_count": native.num_devices, "is_available": lambda: True}
    _replace([torch.accelerator], accelerator)
    _replace([torch.cuda.nvtx], dict.fromkeys(("range_push", "range_pop", "mark"), _ignore))
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "12.9"


def _properties(index: int) -> types.SimpleNamespace:
    """As torch.cuda.get_device_properties gives them."""
    return types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=native.free_and_whole(0)[1],
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        uuid=f"simulated-{index}",
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def _ignore(*arguments: Any) -> None:
    pass


_kernels = torch.library.Library("aten", "IMPL")
"""Of CUDA alone: the CPU has no kernel that could run on views."""


def _product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """torch.mm(a, b, out_dtype=): products and sums in out_dtype."""
    return a.to(out_dtype) @ b.to(out_dtype)


def _histogram(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """torch.histc of integers with a bin for each: CUDA has it, the CPU only for float."""
    assert not x.is_floating_point() and bins == max - min + 1, (x.dtype, bins, min, max)
    values = torch.arange(int(min), int(max) + 1, dtype=x.dtype, device=x.device)
    return (x[:, None] == values).sum(0).to(x.dtype)


def _depthwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: list[int],
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> torch.Tensor:
    """Convolution of each channel alone, by an operator that only CUDA has."""
    padded = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    sizes = []
    for axis in (0, 1):
        reach = dilation[axis] * (kernel_size[axis] - 1) + 1
        sizes.append((padded.shape[2 + axis] - reach) // stride[axis] + 1)
    result: Any = 0
    for row in range(kernel_size[0]):
        for column in range(kernel_size[1]):
            view = padded
            for axis, place in ((0, row), (1, column)):
                start = place * dilation[axis]
                stop = start + stride[axis] * (sizes[axis] - 1) + 1
                view = view[(slice(None),) * (2 + axis) + (slice(start, stop, stride[axis]),)]
            result = result + view * weight[:, 0, row, column, None, None]
    if bias is not None:
        result = result + bias[:, None, None]
    return result.contiguous()


def _install_attention() -> None:
    import attention

    attention.install(_kernels)


def _install_memory() -> None:
    def in_use(device: Any = None) -> int:
        return int(native.memory(index_of(device))[0])

    def peak(device: Any = None) -> int:
        return int(native.memory(index_of(device))[1])

    def statistics(device: Any = None) -> dict[str, int]:
        current, highest, made, blocks = native.memory(index_of(device))
        return {
            "allocated_bytes.all.current": current,
            "allocated_bytes.all.peak": highest,
            "reserved_bytes.all.current": current,
            "reserved_bytes.all.peak": highest,
            "allocation.all.allocated": made,
            "allocation.all.current": blocks,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    names = {
        "memory_allocated": in_use,
        "memory_reserved": in_use,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "memory_stats": statistics,
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(index_of(device)),
        "mem_get_info": lambda device=None: native.free_and_whole(index_of(device)),
        "MemPool": MemPool,
        "use_mem_pool": use_mem_pool,
        "CUDAPluggableAllocator": PluggableAllocator,
        "empty_cache": lambda: None,
    }
    _replace([torch.cuda, torch.cuda.memory], names)
    settings = [""]
    bindings = {
        "_cuda_getAllocatorBackend": lambda: "native",
        "_accelerator_getAllocatorSettings": lambda: settings[0],
        "_accelerator_setAllocatorSettings": lambda text: settings.__setitem__(0, text),
    }
    _replace([torch._C], bindings)
    stock = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return stock(self, size)
        native.resize(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), int(size))
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


class PluggableAllocator:
    """Stands for a library's functions of allocation; the device has its own."""

    def __init__(self, path: str | None, allocate: str, free: str) -> None:
        self._allocator = None


class MemPool:
    """Segments of its own, which can be mapped and unmapped."""

    _numbers = count(1)

    def __init__(self, allocator: Any = None) -> None:
        self._number = next(self._numbers)
        self.id = (0, self._number)

    def snapshot(self) -> list[dict[str, int]]:
        """address, total_size and allocated_size of each segment."""
        return list(native.snapshot(self._number))


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Tensors made in the block, by this thread, lie in the pool."""
    before = native.use_pool(pool.id[1])
    try:
        yield
    finally:
        native.use_pool(before)


def _install_streams() -> None:
    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
            if known:
                return super().__new__(cls, **known)
            where = torch.device("cuda", index_of(device))
            return super().__new__(cls, device=where, priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class Event(torch.Event):
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    def stream(device: Any, number: int) -> Stream:
        return Stream(stream_id=number, device_index=index_of(device), device_type=1)

    def set_stream(chosen: Any) -> None:
        if chosen is not None:
            native.set_stream(chosen.device_index, chosen.stream_id)

    def set_by_id(stream_id: int, device_index: int, device_type: int) -> None:
        native.set_stream(device_index, stream_id)

    classes = {"Stream": Stream, "Event": Event}
    _replace([torch.cuda, torch.cuda.streams], classes)
    names = {
        "current_stream": lambda device=None: stream(device, native.stream(index_of(device))),
        "default_stream": lambda device=None: stream(device, 0),
        "set_stream": set_stream,
        "_set_stream_by_id": set_by_id,
    }
    _replace([torch.cuda], names)
    bindings = {
        "_cuda_getCurrentStream": lambda index: (native.stream(index), index, 1),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_getCurrentRawStream": native.stream,
        "_cuda_setStream": set_by_id,
    }
    _replace([torch._C], bindings)


def _install_generators() -> None:
    generators = tuple(native.default_generator(index) for index in range(native.num_devices()))

    def of(device: Any) -> torch.Generator:
        return generators[index_of(None if device == "cuda" else device)]

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def seed_current(seed: int) -> None:
        of(None).manual_seed(seed)

    def set_state(state: torch.Tensor, device: Any = "cuda") -> None:
        of(device).set_state(state.cpu())

    names = {
        "default_generators": generators,
        "get_rng_state": lambda device="cuda": of(device).get_state(),
        "set_rng_state": set_state,
        "manual_seed": seed_current,
        "manual_seed_all": seed_all,
        "initial_seed": lambda: of(None).initial_seed(),
    }
    _replace([torch.cuda, torch.cuda.random], names)


def _install_groups() -> None:
    import watchdog

    gloo = c10d.ProcessGroupGloo

    class WhileMade(type):
        """torch asks what it has just made; whoever asks later gets the truth."""

        def __instancecheck__(cls, value: object) -> bool:
            return sys._getframe(1).f_code.co_name == "_new_process_group_helper"

    class ProcessGroupNCCL(metaclass=WhileMade):
        class Options:
            def __init__(self, is_high_priority_stream: bool = False) -> None:
                self.is_high_priority_stream = is_high_priority_stream
                self._timeout: Any = None
                self.group_name = ""
                self.global_ranks_in_group: list[int] = []
                self.config = types.SimpleNamespace()

        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            watchdog.start()
            ranks = options.global_ranks_in_group or range(size)
            group = gloo(store, rank, size, timeout=options._timeout)
            name = f"nccl:{options.group_name}:{list(ranks)}"
            return native.Group(group, True, name, store)

    class ProcessGroupGloo(metaclass=WhileMade):
        create_device = gloo.create_device
        create_default_device = gloo.create_default_device

        def __new__(cls, store: Any, rank: int, size: int, timeout: Any = None) -> Any:
            watchdog.start()
            made_by = sys._getframe(1).f_locals
            ranks = made_by.get("global_ranks_in_group") or range(size)
            name = f"gloo:{made_by.get('group_name', '?')}:{list(ranks)}"
            return native.Group(gloo(store, rank, size, timeout=timeout), False, name, store)

    _replace([c10d, dist], {"ProcessGroupNCCL": ProcessGroupNCCL})
    _replace([c10d], {"_NCCL_AVAILABLE": True})
    _replace([c10d, dist], {"is_nccl_available": lambda: True})
    _replace([c10d], {"ProcessGroupGloo": ProcessGroupGloo})
    _replace([torch._C], {"_nccl_version": lambda: 22703, "_nccl_version_suffix": lambda: b""})


def _install_batches() -> None:
    """Messages of one batch share their group's communicator."""
    stock = c10d.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        before = native.in_batch(True)
        try:
            return stock(p2p_op_list)
        finally:
            native.in_batch(before)

    _replace([c10d, dist], {"batch_isend_irecv": batch_isend_irecv})
