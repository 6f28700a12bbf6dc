"""`NcclPublisher`: sends weights to a server with vLLM's own NCCL backend, without spmdflow in it.

The trainer's first rank gathers whole tensors, chunk by chunk. vLLM's trainer engine broadcasts
them to the workers. There are no checksums, because none of our code runs in the server. Written
against vLLM 0.32 and never run, because it needs a GPU on both sides.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from spmdflow.errors import ConfigError
from spmdflow.hybrid_engine.reshard import boxes_of, training_tables
from spmdflow.hybrid_engine.stream import GroupWire, WholeTensors
from spmdflow.rollout.vllm_contract import missing_names
from spmdflow.serving.connection import address_towards, share_address
from spmdflow.serving.server import VllmServer
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import parameters
from spmdflow.worker_api.metric import Max, Metric
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine

_NAMES = {
    "vllm.distributed.weight_transfer": (
        "ParamMeta",
        "WeightSource.metadata",
        "WeightTransferTrainerFactory.trainer_init",
    ),
    "vllm.distributed.weight_transfer.nccl_engine": (
        "NCCLTrainerInitInfo",
        "NCCLTrainerWeightTransferEngine.send_weights",
    ),
}
"""Names of vLLM that the trainer's side uses."""


class NcclPublisher:
    """One rank's side of the connection to a server with the backend nccl."""

    def __init__(self, engine: TrainEngine, context: WorkerContext, cfg: Any, url: str) -> None:
        """Connect to the server; all ranks of the trainer together.

        cfg: the actor's settings; weights are sent in its rollout.dtype. url: the server's.
        ConfigError without CUDA.
        """
        if context.device.type != "cuda":
            got = f"a trainer on {context.device.type} for the backend nccl"
            do = "use the backend spmdflow, or train on a GPU"
            raise ConfigError.of(f"weight server {url}", got, "CUDA", do)
        self._engine = engine
        self._source = source_of(engine, context, cfg)
        self._server = VllmServer(url, seconds=context.call_seconds)
        layout = context.layout
        self._is_first = context.rank == layout.ranks[0]
        host = ""
        port = 0
        workers = 0
        if self._is_first:
            host = address_towards(self._server.host, self._server.port)
            port = _free_port()
            workers = self._server.num_workers()
        host, port, workers = share_address(
            (host, port, workers), context.groups.get(layout.ranks), layout.ranks[0], context.device
        )
        rendezvous = NcclRendezvous(host, port, workers, self._is_first)
        shapes = {}
        for each in parameters(self._source.arch):
            shapes[each.name] = torch.Size(each.shape)
        self._sender = build_nccl_sender(
            rendezvous, self._server, shapes, self._source.tensors, dtype=self._source.dtype
        )

    def publish(self) -> dict[str, Metric]:
        """Send the trainer's weights to the server; all ranks of the trainer call it together.

        The first rank pauses the server before and resumes it after. Returns metrics. There is no
        check.
        """
        version = self._engine.weights_version
        self._server.version = str(version)
        if self._is_first:
            self._server.pause()
        self._sender.send_weights()
        if self._is_first:
            self._server.resume()
        return {
            "publish/weights_version": Max(float(version)),
            "publish/weights_verified": Max(0.0),
        }


class TrainerSource:
    """Iterates whole tensors of a train engine on its first rank, for vLLM's trainer engines."""

    def __init__(self, engine: TrainEngine, gather: WholeTensors, arch: Architecture) -> None:
        """gather: brings every whole tensor to the first rank."""
        self._engine = engine
        self._gather = gather
        self.arch = arch
        self.dtype = gather.dtype

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) on the first rank, nothing on the others;
        collective."""
        return self._gather.run(self._engine.blocks())


def source_of(engine: TrainEngine, context: WorkerContext, cfg: Any) -> TrainerSource:
    """Return a source of the trainer's complete tensors on its first rank, in rollout.dtype.

    The tensors are those of model.path, on the trainer's device.
    """
    arch = Architecture.dense_from_folder(cfg.model.path)
    layout = context.layout
    gather = WholeTensors(
        boxes_of(training_tables(arch, layout, kind=cfg.engine.kind)),
        {layout.ranks[0]: parameters(arch)},
        lambda plan: GroupWire(context.groups, plan, rank=context.rank),
        rank=context.rank,
        dtype=getattr(torch, cfg.rollout.precision),
        device=context.device,
        seconds=context.call_seconds,
    )
    return TrainerSource(engine, gather, arch)


@dataclass(frozen=True)
class NcclRendezvous:
    """Where the NCCL engines of the trainer's first rank and of all workers connect."""

    host: str
    port: int
    num_workers: int
    is_sender: bool
    """Whether this is the trainer's first rank; the others only take part in `Tensors`."""


Tensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Starts a new pass over (Hugging Face name, whole tensor); collective over the trainer."""


def build_nccl_sender(
    rendezvous: NcclRendezvous,
    client: Any,
    shapes: Mapping[str, torch.Size],
    tensors: Tensors,
    *,
    dtype: Any,
) -> Any:
    """Return vLLM's NCCL trainer engine for our tensors; each `send_weights()` is one update.

    All ranks of the trainer build it together, each on a CUDA device; only the first rank
    (is_sender) has rank 0. client: an object with the four methods of VLLMWeightSyncClient. shapes:
    name -> shape, in the order of the tensors. ConfigError if the installed vLLM lacks the
    interface.
    """
    missing = missing_names(_NAMES)
    if missing:
        got = f"a vLLM that lacks {', '.join(missing)}"
        expected = "its NCCL engine as in 0.30 to 0.33 (read in 0.32, never run)"
        do = "install one of them, or serve with the backend spmdflow"
        raise ConfigError.of("weight transfer", got, expected, do)
    nccl = import_module("vllm.distributed.weight_transfer.nccl_engine")
    transfer = import_module("vllm.distributed.weight_transfer")
    facts = nccl.NCCLTrainerInitInfo(
        master_address=rendezvous.host,
        master_port=rendezvous.port,
        world_size=1 + rendezvous.num_workers,
        rank=0 if rendezvous.is_sender else 1,
        packed=False,  # packing reads our tensors on streams that do not wait for the trainer's
    )
    return transfer.WeightTransferTrainerFactory.trainer_init(
        facts, client=client, source=build_weight_source(shapes, tensors, dtype=dtype)
    )


def build_weight_source(shapes: Mapping[str, torch.Size], tensors: Tensors, *, dtype: Any) -> Any:
    """Return an object of vLLM's class WeightSource over our tensors, for its trainer engines.

    Each iteration starts a new pass over `tensors`. shapes: name -> shape, in the same order.
    dtype: of all tensors.
    """
    transfer = import_module("vllm.distributed.weight_transfer")

    def describe(_: Any) -> list[Any]:
        """Name, dtype and shape of each tensor."""
        result = []
        for name, shape in shapes.items():
            result.append(transfer.ParamMeta(name, dtype, tuple(shape)))
        return result

    is_property = isinstance(transfer.WeightSource.metadata, property)  # since 0.33

    class GatheredTensors(transfer.WeightSource):  # type: ignore[misc, name-defined]
        """Gathers whole tensors while it is iterated."""

        metadata = functools.cached_property(describe) if is_property else describe

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(tensors())

        iter_full = __iter__  # the name since 0.33

    return GatheredTensors()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
