"""`Publisher`: the trainer's side of a connection to a server, one class for each backend."""

from __future__ import annotations

from typing import Any, Protocol

from spmdflow.errors import ConfigError
from spmdflow.serving.nccl import NcclPublisher
from spmdflow.serving.sender import WeightPublisher
from spmdflow.worker_api.metric import Metric
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine


class Publisher(Protocol):
    """One rank's side of the connection to a server."""

    def publish(self) -> dict[str, Metric]:
        """Send the trainer's weights to the server; all ranks of the trainer together."""


_BACKENDS: dict[str, type[WeightPublisher] | type[NcclPublisher]] = {
    "spmdflow": WeightPublisher,
    "nccl": NcclPublisher,
}


def publisher_of(
    engine: TrainEngine, context: WorkerContext, cfg: Any, *, url: str, backend: str
) -> Publisher:
    """Connect to the server and return its publisher; all ranks of the trainer call it together.

    backend: spmdflow or nccl, as the server was started. cfg: the actor's settings. ConfigError for
    another backend, or if the engine has adapters that are not merged.
    """
    if backend not in _BACKENDS:
        expected = f"one of {', '.join(_BACKENDS)}"
        do = "choose the one that the server was started with"
        raise ConfigError.of("connect_server", f"backend {backend!r}", expected, do)
    if not engine.merges_adapters:
        expected = "merged weights, because a server takes no adapters"
        do = "set actor.rollout.weights=auto"
        raise ConfigError.of("connect_server", "actor.rollout.weights=adapter", expected, do)
    return _BACKENDS[backend](engine, context, cfg, url)
