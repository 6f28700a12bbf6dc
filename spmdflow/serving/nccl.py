"""`NcclPublisher`: weights to a vLLM that has vLLM's own NCCL backend and no spmdflow beside it.

Whole tensors come to the trainer's first rank, chunk by chunk by the planner; vLLM's trainer
engine broadcasts them to the workers. There is no certificate: nothing of ours runs over there.
Written against vLLM 0.32 and never run, as it needs a GPU on both sides.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spmdflow.errors import ConfigError
from spmdflow.hybrid_engine.reshard import boxes_of
from spmdflow.hybrid_engine.stream import GroupWire
from spmdflow.hybrid_engine.table import training_tables
from spmdflow.rollout.vllm_transfer import NcclEnd, nccl_sender
from spmdflow.serving.meeting import address_towards, agreed_address
from spmdflow.serving.server import VllmServer
from spmdflow.serving.whole import WholeTensors
from spmdflow.transfer.worker import Max, Metric, WorkerContext
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import parameters
from spmdflow.workers.engine import TrainEngine


class NcclPublisher:
    """One rank's end."""

    def __init__(self, engine: TrainEngine, context: WorkerContext, cfg: Any, url: str) -> None:
        """cfg: the actor's settings, whose rollout.dtype travels; url: the server's.

        ConfigError without CUDA.
        """
        if context.device.type != "cuda":
            raise ConfigError(
                f"weight server {url}: got a trainer on {context.device.type} for the backend "
                f"nccl, expected CUDA; use the backend spmdflow, or train on a GPU"
            )
        self._engine, self._source = engine, source_of(engine, context, cfg)
        self._server = VllmServer(url, seconds=context.config.run.call_seconds)
        layout = context.layout
        self._is_first = context.rank == layout.ranks[0]
        host, port, workers = "", 0, 0
        if self._is_first:
            host = address_towards(self._server.host, self._server.port)
            port, workers = _free_port(), self._server.num_workers()
        host, port, workers = agreed_address(
            (host, port, workers), context.groups.get(layout.ranks), layout.ranks[0], context.device
        )
        end = NcclEnd(host, port, workers, self._is_first)
        shapes = {each.name: torch.Size(each.shape) for each in parameters(self._source.arch)}
        self._sender = nccl_sender(
            end, self._server, shapes, self._source.tensors, dtype=self._source.dtype
        )

    def publish(self) -> dict[str, Metric]:
        """Bring the trainer's weights to the server; all ranks of the trainer together."""
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
    """Whole tensors of a train engine on its first rank, as vLLM's trainer engines iterate them."""

    def __init__(self, engine: TrainEngine, way: WholeTensors, arch: Architecture) -> None:
        self._engine, self._way, self.arch = engine, way, arch
        self.dtype = way.dtype

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor); elsewhere than on the first rank they are empty."""
        return self._way.run(self._engine.blocks())


def source_of(engine: TrainEngine, context: WorkerContext, cfg: Any) -> TrainerSource:
    """The source of a trainer, in rollout.dtype, on its device."""
    arch, layout = Architecture.from_folder(cfg.model.path), context.layout
    way = WholeTensors(
        arch,
        boxes_of(training_tables(arch, layout, kind=cfg.engine.kind)),
        layout.ranks[:1],
        lambda plan: GroupWire(context.groups, plan, rank=context.rank),
        rank=context.rank,
        dtype=getattr(torch, cfg.rollout.dtype),
        device=context.device,
        seconds=context.config.run.call_seconds,
    )
    return TrainerSource(engine, way, arch)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
