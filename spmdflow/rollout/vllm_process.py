"""vLLM in the trainer's process: its process groups, and restoring the state that it changes.

vLLM creates its own world and groups. Here its coordinators are real ones, but the two process
groups that each would create (device, host) are passed in: the trainer's tp and pp groups of the
generation replica, and a group of this rank alone for every axis of size 1. vLLM's world is the
replica, whatever the default process group is. Replicas know nothing of each other.

vLLM also reseeds the random states, sets environment variables and, on CPU, replaces functions of
torch. The CUDA parts were written for 0.32 and ran on simulated devices only.
"""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_names
from spmdflow.parallel.allocator import has_expandable_segments
from spmdflow.parallel.group import GroupTable
from spmdflow.rollout.generator import Replica

_SINGLE = ("_DCP", "_PCP", "_DP")
"""Axes that always have one rank here. Some exist only in some versions."""
_ALL = ("_WORLD", "_TP", "_ETP", "_EP", "_PP", *_SINGLE, "_NODE_COUNT")
_PREFIX = "spmdflow_"
"""Prefix of the coordinators' names. On CPU, names that begin with tp or pp use shared memory whose
name is the same in every job on a node."""
_FAST = "tp"
"""The name with which vLLM reduces over a coordinator by its own kernels (custom all-reduce and
symmetric memory). vLLM 0.29 and older do so for every name that contains it."""
_PLAIN = f"{_PREFIX}tensor"
"""The name of the same coordinator if NCCL or gloo reduces."""
_REPLACED_IN_TORCH: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch, ("Event", "set_num_threads")),
    (torch.cuda, ("Event", "Stream", "set_stream", "current_stream", "stream")),
    (torch.Tensor, ("pin_memory", "record_stream")),
)
"""Functions that vLLM replaces on CPU for the whole process, although it works without that.

Functions of torch.accelerator stay replaced: on CPU the originals only raise, and shutdown calls
them. On CUDA, vLLM replaces torch.cuda.set_stream to track the current stream; that also stays.
"""


class Groups:
    """The process groups of one replica, in the form that vLLM needs."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        """ConfigError if this process already has an engine; see `close`."""
        if _state()._WORLD is not None:
            got = "a second vLLM engine in one process"
            expected = "one at a time, because its parallel state is global"
            do = f"give one of the models rollout.engine={generator_names()[0]}"
            raise ConfigError.of("rollout.engine=vllm", got, expected, do)
        self.replica = replica
        self.device = device
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        own = replica.groups or GroupTable(dist.get_rank(), timeout_seconds=60)
        self._alone = own.get((dist.get_rank(),), backend="gloo")

    def install(self) -> None:
        """Sets the global coordinators in vLLM's parallel state to groups of this replica.

        All ranks of the replica call it together. World, tp and pp get the replica's groups; the
        axes that always have one rank (_DP, ...) get a group of this rank alone. _ETP and _EP,
        which mixtures ask for, are the coordinator of tp, and the number of nodes is 1.
        """
        replica = self.replica
        state = _state()
        state._WORLD = self._coordinator(_PREFIX + "world", replica.ranks, communicates=False)
        state._TP = self._coordinator(
            tensor_group_name(
                self.device,
                num_ranks=len(replica.tp_ranks),
                num_visible=torch.accelerator.device_count(),
                variables=os.environ,
            ),
            replica.tp_ranks,
        )
        state._PP = self._coordinator(_PREFIX + "pp", replica.pp_ranks)
        for attribute in _SINGLE:
            if hasattr(state, attribute):
                name = _PREFIX + attribute.strip("_").lower()
                setattr(state, attribute, self._coordinator(name, (replica.rank,)))
        for attribute in ("_ETP", "_EP"):  # all experts' tensors are cut as the others are
            if hasattr(state, attribute):
                setattr(state, attribute, state._TP)
        state._NODE_COUNT = 1

    def close(self) -> None:
        """Removes the coordinators. The trainer's groups stay."""
        release()
        if self.replica.groups is None:
            dist.destroy_process_group(self._alone)

    def _coordinator(self, name: str, ranks: tuple[int, ...], *, communicates: bool = True) -> Any:
        """Returns a vLLM coordinator over some ranks, built on existing process groups.

        vLLM creates a device group and a host group with dist.new_group, which is replaced
        meanwhile so that it returns ours: nccl (gloo on a CPU) and gloo over the ranks, or for one
        rank the group of this rank alone. AssertionError if vLLM did not take both.
        communicates: False for the world, over which vLLM sends nothing between devices.
        """
        process_groups = [self._alone, self._alone]
        if len(ranks) > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            process_groups = []
            for group_backend in (backend, "gloo"):
                process_groups.append(self.replica.group(ranks, group_backend))
        with replace_attribute(dist, "new_group", lambda *_, **__: process_groups.pop(0)):
            coordinator = _state().GroupCoordinator(
                group_ranks=[list(ranks)],
                local_rank=self.device.index or 0,
                torch_distributed_backend=dist.get_backend(process_groups[0]),
                use_device_communicator=len(ranks) > 1 and communicates,
                group_name=name,
            )
        assert not process_groups, f"vLLM's coordinator {name} did not take both groups"
        return coordinator


def tensor_group_name(
    device: torch.device, *, num_ranks: int, num_visible: int, variables: Mapping[str, str]
) -> str:
    """The name of the tensor-parallel coordinator, by which vLLM chooses how it reduces.

    On CUDA vLLM's own kernels reduce, except in two cases, in which NCCL does: this process does
    not see the devices of all ranks (num_visible), so vLLM could not ask whether they reach one
    another; or variables (such as os.environ) turn on expandable segments, whose memory vLLM cannot
    share between processes: it would end the process while it captures its graphs (vLLM issue
    42609, open with 0.33).
    """
    if device.type != "cuda" or num_visible < num_ranks or has_expandable_segments(variables):
        return _PLAIN
    return _FAST


def release(*_: Any, **__: Any) -> None:
    """Destroys vLLM's own communicators and sets its global coordinators to None.

    Replaces vLLM's cleanup, which would destroy the default process group. All arguments are
    ignored.
    """
    state = _state()
    for name in _ALL:
        communicator = getattr(getattr(state, name, None), "device_communicator", None)
        if communicator is not None and hasattr(communicator, "destroy"):
            communicator.destroy()  # vLLM's own NCCL communicators, never our groups
        if hasattr(state, name):
            setattr(state, name, None)


def executor_class(groups: Groups, on_load: Callable[[Any], None] | None) -> type:
    """vLLM's one-process executor on `groups`. Every rank of the replica runs its own scheduler.

    on_load: called with vLLM's model runner once it has its model, before any graph is captured.

    The schedules are equal because all ranks get the same requests in the same order and have the
    same number of KV blocks.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    worker = import_module("vllm.v1.worker.gpu_worker")
    replica = groups.replica
    device = groups.device

    class SpmdExecutor(UniProcExecutor):
        supports_pp = True

        def _init_executor(self) -> None:
            """Installs our groups, then lets vLLM initialize its worker without groups of its own.

            With several pipeline stages, sets vLLM's backend to external_launcher: the last stage
            then broadcasts its logits to the others.
            """
            groups.install()
            if replica.pp_size > 1:  # the last stage then broadcasts its logits to the others
                self.vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
            with replace_attribute(worker, "init_distributed_environment", lambda *_, **__: None):
                super()._init_executor()
            if on_load is not None:
                on_load(self.driver_worker.worker.model_runner)

        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", replica.replica_rank, device.index or 0

        def determine_available_memory(self) -> list[int]:
            """Returns [bytes for the KV cache]; all ranks of the replica get equally many blocks.

            This is the smallest memory of any rank, times this rank's layers, divided by the most
            layers of any rank. All ranks of the replica call it together; a single rank keeps
            vLLM's number.
            """
            memory = super().determine_available_memory()
            if replica.size == 1:
                return memory
            num_layers = len(self.get_kv_cache_specs()[0])
            facts = torch.tensor([memory[0], num_layers], device=device)
            facts_of_ranks = torch.stack(replica.gather(facts))
            smallest = int(facts_of_ranks[:, 0].min())
            most_layers = int(facts_of_ranks[:, 1].max())
            return [smallest * num_layers // most_layers]  # equal blocks on uneven stages

    return SpmdExecutor


def _state() -> Any:
    return import_module("vllm.distributed.parallel_state")


@contextmanager
def preserve_process_state(*, own_variables: str) -> Iterator[None]:
    """Restores random states, stream, thread count, environment and torch's functions afterwards.

    Environment variables that begin with own_variables keep the values that were set inside.
    Garbage collection is off inside: it takes a fifth of the time to import vLLM and build an
    engine.
    """
    with ExitStack() as stack:
        stack.callback(_restore_environment, dict(os.environ), own_variables)
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if torch.cuda.is_available():
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state())
            stack.callback(_return_to_stream, torch.cuda.current_stream())
        for owner, names in () if torch.cuda.is_available() else _REPLACED_IN_TORCH:
            for name in names:
                stack.callback(setattr, owner, name, getattr(owner, name))
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        yield


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets owner.name to value inside the block; the old value is restored even after an error."""
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def keep_caches_apart(device: torch.device) -> None:
    """Gives each device its own folder of vLLM's compile cache, by setting VLLM_CACHE_ROOT.

    The folder is VLLM_CACHE_ROOT/HOSTNAME-INDEX. Call this before an engine is built. Compiled code
    belongs to one device, but vLLM's cache distinguishes engines by rank only, and the ranks of
    every replica count from 0.
    """
    root = import_module("vllm.envs").VLLM_CACHE_ROOT
    leaf = f"{socket.gethostname()}-{device.index}"
    if os.path.basename(root) != leaf:
        os.environ["VLLM_CACHE_ROOT"] = os.path.join(root, leaf)


class SleepingMemory:
    """Memory with a tag in vLLM's sleep-mode allocator, freed and reallocated like `Storages`.

    vLLM's own sleep frees all tags at once, and prevents the scheduler from running.
    """

    def __init__(
        self, tag: str, tensors: Iterable[Tensor], preserved: Iterable[Tensor] = ()
    ) -> None:
        """tensors: of that memory. preserved: tensors whose values are copied to host memory
        meanwhile."""
        self._tag = tag
        self._tensors = list(tensors)
        self._preserved = [(tensor, tensor.cpu()) for tensor in preserved]

    def free(self) -> None:
        """Releases the memory of all allocations with the tag; the tensors' addresses stay valid.

        Waits for the device first. Allocations that are already asleep are skipped.
        """
        unmap = import_module("vllm.device_allocator.cumem").unmap_and_release
        torch.accelerator.synchronize()
        for allocation in _allocator().pointer_to_data.values():
            if allocation.tag == self._tag and not allocation.is_asleep:
                unmap(allocation.handle)
                allocation.is_asleep = True

    def restore(self) -> None:
        """Reallocates the memory: zeros, then the values of the preserved tensors."""
        _allocator().wake_up([self._tag])
        for tensor in self._tensors:
            tensor.data.zero_()
        for tensor, values in self._preserved:
            tensor.data.copy_(values)


def _allocator() -> Any:
    return import_module("vllm.device_allocator").get_mem_allocator_instance()


def trim_weights() -> None:
    """Makes vLLM's sleep-mode allocator release the memory of freed weights.

    Their blocks return to a private pool, which torch keeps as long as the pool exists. Segments of
    the pool in which nothing is allocated are unmapped, unless they are asleep. The allocator has
    one pool of weights up to vLLM 0.30, and a list of pools in later versions.
    """
    unmap = import_module("vllm.device_allocator.cumem").unmap_and_release
    allocator = _allocator()
    pools = allocator.allocator_and_pools.get("weights", [])
    for pool, _ in pools if isinstance(pools, list) else [pools]:
        for segment in pool.snapshot():
            known = allocator.pointer_to_data.get(segment["address"])
            if known and segment["allocated_size"] == 0 and not getattr(known, "is_asleep", False):
                unmap(allocator._python_free_callback(segment["address"]))


def _return_to_stream(before: Any) -> None:
    """Makes `before` this thread's stream again, for torch and for vLLM. It waits for the other.

    vLLM's `current_stream` sets a new stream for the thread that asks first, and never sets it
    back. The trainer would compute on it, while the other threads do not, and torch would not reuse
    the memory of one stream on the other. `torch.cuda.set_stream` is looked up here, because vLLM
    has replaced it by a function with which it also remembers the stream.
    """
    own = torch.cuda.current_stream()
    if own != before:
        before.wait_stream(own)
    torch.cuda.set_stream(before)


def _restore_environment(before: dict[str, str], own_variables: str) -> None:
    """Resets all environment variables to `before`, except those that begin with own_variables."""
    for name in set(os.environ) | set(before):
        if name.startswith(own_variables):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
