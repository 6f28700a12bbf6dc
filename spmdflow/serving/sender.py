"""`WeightPublisher`: the trainer's side of a connection to a vLLM server in another program.

Every rank of the trainer sends its boxes directly to every worker of the server, in chunks of whole
tensors. The first rank also makes the HTTP requests of vLLM's own interface. The server pauses
during an update. It resumes only if the hashes of the weights that its workers' forward reads equal
those of the trainer's shards.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spmdflow.errors import WeightSyncError
from spmdflow.hybrid_engine.sync import compare_hashes
from spmdflow.serving.connection import (
    DTYPES,
    Connection,
    address_towards,
    empty_header,
    empty_verdict,
    pack_hashes,
    share_address,
    unpack_hashes,
)
from spmdflow.serving.server import VllmServer
from spmdflow.weights.architecture import Architecture
from spmdflow.worker_api.metric import Max, Metric, Sum
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine


class WeightPublisher:
    """One rank's side of the connection to a server with the backend spmdflow."""

    def __init__(self, engine: TrainEngine, context: WorkerContext, cfg: Any, url: str) -> None:
        """Connect to the server; all ranks of the trainer together.

        cfg: the actor's settings. url: the server's. WeightSyncError if the server does not answer,
        serves another model, or its workers do not connect.
        """
        self._engine = engine
        self._every = cfg.rollout.verify_every
        self._count = 0
        self._rank = context.rank
        layout = context.layout
        seconds = context.call_seconds
        self._server = VllmServer(url, seconds=seconds)
        self._is_first = self._rank == layout.ranks[0]
        store = None
        own_address = ("", 0, 0)
        if self._is_first:
            workers = self._server.num_workers()
            limit = timedelta(seconds=seconds)
            host = address_towards(self._server.host, self._server.port)
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            own_address = host, store.port, workers
        group = context.groups.get(layout.ranks)
        host, port, workers = share_address(own_address, group, layout.ranks[0], context.device)
        self._connection = Connection(
            host=host,
            port=port,
            num_workers=workers,
            kind=cfg.engine.kind,
            layout=asdict(layout),
            architecture=asdict(Architecture.dense_from_folder(cfg.model.path)),
            seconds=seconds,
        )
        self._store = store  # keeps the store alive: the workers connect to it
        facts = {"facts": self._connection.to_facts()}
        with _ServerRequest(
            self._is_first, lambda: self._server.init_weight_transfer_engine(facts)
        ) as ask:
            self._wire = self._connection.join(self._rank, store, meanwhile=ask.check)
            precision = torch.zeros(1, dtype=torch.int64)
            self._wire.share(precision, self._connection.workers[0], meanwhile=ask.check)
        self.dtype = DTYPES[int(precision)]
        """Precision of the server's weights; the trainer's are rounded to it."""
        self._tensors = self._connection.tensors(self._rank, self._wire, self.dtype)

    def publish(self) -> dict[str, Metric]:
        """Send the trainer's weights to the server; all ranks of the trainer call it together.

        The server pauses before and resumes after. Hashes are compared in the first call and in
        every verify_every-th one after it (0: never). Returns metrics. WeightSyncError with the
        first tensor that differs on the server, or if it cannot use the weights; it then stays
        paused.
        """
        version = self._engine.weights_version
        verify = self._every > 0 and self._count % self._every == 0
        self._count += 1
        connection = self._connection
        header = empty_header(self._connection)
        header[0] = version
        if verify:
            hashes = self._engine.shard_hashes(self.dtype)
            header[1] = 1
            header[2:] = pack_hashes(connection, hashes)
        if self._is_first:
            self._server.pause()
            self._server.start_weight_update()
        with _ServerRequest(
            self._is_first, lambda: self._server.update_weights({"facts": {}})
        ) as ask:
            self._wire.share(header, connection.training.ranks[0], meanwhile=ask.check)
            for _ in self._tensors.run(self._engine.blocks()):
                pass
        self._finish(version, hashes if verify else None)
        if self._is_first:
            self._server.resume()
        sent = sum(self._tensors.received_bytes_of(worker) for worker in connection.workers)
        return {
            "publish/weights_version": Max(float(version)),
            "publish/weights_verified": Max(float(verify)),
            "publish/bytes": Sum(float(sent) if self._is_first else 0.0),
        }

    def _finish(self, version: int, expected: dict[str, int] | None) -> None:
        """Make the server use the weights, and compare its hashes with the expected ones.

        All ranks call it together. expected: name -> hash; None if this update is not verified.
        WeightSyncError if a hash differs, or if the server could not use the weights.
        """
        connection = self._connection
        verdict = empty_verdict(self._connection)
        finish = self._server.finish_weight_update
        with _ServerRequest(self._is_first, lambda: finish(str(version))) as ask:
            self._wire.share(verdict, connection.workers[0], meanwhile=ask.check)
            if expected is not None and verdict[0]:
                compare_hashes(expected, unpack_hashes(connection, verdict[1:]), version)
        if not verdict[0]:
            raise WeightSyncError(
                f"weight server {self._server.url}: got weights of version {version} that it could "
                f"not use, expected it to take them; look at the server's log and restart it"
            )


class _ServerRequest:
    """Context of a request to the server that runs in its own thread; on the first rank only."""

    def __init__(self, is_mine: bool, request: Callable[[], None]) -> None:
        self._is_mine = is_mine
        self._request = request

    def __enter__(self) -> _ServerRequest:
        """Start the request, on the rank that makes it."""
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._answer: Future[None] | None = None
        if self._is_mine:
            self._answer = self._pool.submit(self._request)
        return self

    def check(self) -> None:
        """Raise the request's error, if it has failed by now."""
        if self._answer is not None and self._answer.done():
            self._answer.result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the request to end, unless the body failed; raises the request's error."""
        self._pool.shutdown(wait=kind is None)
        if kind is None and self._answer is not None:
            self._answer.result()
