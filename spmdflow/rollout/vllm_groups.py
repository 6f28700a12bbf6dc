"""vLLM's parallel state on process groups that stay ours.

vLLM makes a world and its groups for itself. Here its coordinators are real ones, but the two
groups that each would create (device, host) are handed to it: the trainer's tp and pp groups of
the generation replica, a private one-rank group for every axis of size 1. vLLM's world is the
replica, whatever the default process group is; replicas know nothing of each other.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_names
from spmdflow.rollout.replica import Replica
from spmdflow.rollout.vllm_process import replaced

_SINGLE = ("_DCP", "_PCP", "_DP")
"""Axes that always have one rank here; some exist in some versions only."""
_ALL = ("_WORLD", "_TP", "_ETP", "_PP", *_SINGLE, "_NODE_COUNT")
_PREFIX = "spmdflow_"
"""Of the coordinators' names: those that begin with tp or pp get shared memory on CPU, whose name
is the same in every job of a node."""


class Groups:
    """The process groups of one replica, as vLLM needs them."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        """ConfigError if an engine lives in this process already; see `close`."""
        if _state()._WORLD is not None:
            raise ConfigError(
                "rollout.engine=vllm: got a second vLLM engine in one process, expected one at a "
                "time, as its parallel state is global; give one of the models "
                f"rollout.engine={generator_names()[0]}"
            )
        self._replica, self._device = replica, device
        self._private = _private_group()

    def install(self) -> None:
        """Fill vLLM's parallel state."""
        replica, state = self._replica, _state()
        state._WORLD = self._coordinator("world", replica.ranks)
        state._TP = self._coordinator("tp", replica.tp_ranks)
        state._PP = self._coordinator("pp", replica.pp_ranks)
        for name in _SINGLE:
            if hasattr(state, name):
                setattr(state, name, self._coordinator(name.strip("_").lower(), (replica.rank,)))
        if hasattr(state, "_ETP"):
            state._ETP = state._TP
        state._NODE_COUNT = 1

    def close(self) -> None:
        """Forget the coordinators, destroy the private group; the trainer's groups stay."""
        release()
        dist.destroy_process_group(self._private)

    def _coordinator(self, name: str, ranks: tuple[int, ...]) -> Any:
        given = list(self._device_and_host(ranks))
        with replaced(dist, "new_group", lambda *_, **__: given.pop(0)):
            coordinator = _state().GroupCoordinator(
                group_ranks=[list(ranks)],
                local_rank=self._device.index or 0,
                torch_distributed_backend=dist.get_backend(given[0]),
                use_device_communicator=len(ranks) > 1 and name != "world",
                group_name=_PREFIX + name,
            )
        assert not given, f"vLLM's coordinator {name} did not take both groups"
        return coordinator

    def _device_and_host(
        self, ranks: tuple[int, ...]
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if len(ranks) == 1:
            return self._private, self._private
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        return self._replica.group(ranks, backend), self._replica.group(ranks, "gloo")


def release(*_: Any, **__: Any) -> None:
    """In place of vLLM's cleanup, which would end the default process group."""
    state = _state()
    for name in _ALL:
        communicator = getattr(getattr(state, name, None), "device_communicator", None)
        if communicator is not None and hasattr(communicator, "destroy"):
            communicator.destroy()  # vLLM's own NCCL communicators, never our groups
        if hasattr(state, name):
            setattr(state, name, None)


def executor_class(groups: Groups, replica: Replica, device: torch.device) -> type:
    """vLLM's one-process executor on `groups`; every rank of the replica schedules for itself.

    The schedules are equal because all ranks get the same requests in the same order and have the
    same number of KV blocks.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    worker = import_module("vllm.v1.worker.gpu_worker")

    class SpmdExecutor(UniProcExecutor):
        supports_pp = True

        def _init_executor(self) -> None:
            groups.install()
            if replica.pp_size > 1:  # the last stage then broadcasts its logits to the others
                self.vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
            with replaced(worker, "init_distributed_environment", lambda *_, **__: None):
                super()._init_executor()

        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", replica.ranks.index(replica.rank), device.index or 0

        def determine_available_memory(self) -> list[int]:
            memory = super().determine_available_memory()
            if replica.size == 1:
                return memory
            num_layers = len(self.get_kv_cache_specs()[0])
            facts = torch.tensor([memory[0], num_layers], device=device)
            everyone = torch.stack(replica.gather(facts))
            smallest, most_layers = int(everyone[:, 0].min()), int(everyone[:, 1].max())
            return [smallest * num_layers // most_layers]  # equal blocks on uneven stages

    return SpmdExecutor


def _private_group() -> dist.ProcessGroup:
    """A one-rank gloo group, made by this rank alone: it needs no other, and pools differ."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _state() -> Any:
    return import_module("vllm.distributed.parallel_state")
